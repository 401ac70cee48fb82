"""From a conversation to token ids and a loss mask, by the tokenizer's own chat template and nothing else.

Where the template marks its answers (`{% generation %}`) the marks are the mask. Otherwise the conversation is
rendered up to each answer and through it, and the difference is the answer: exact, or the conversation is refused.
Header text is never searched for, so text that looks like a header inside a message cannot fool it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.data.conversations import Conversation, Message, Prompt
from draftsmith.decisions import Decision
from draftsmith.errors import ConfigError, InputError

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)  # templates are code


@dataclass(frozen=True, eq=False, slots=True)
class Document:
    """One conversation as the drafter sees it. `supervised_T` marks the answers with their end-of-turn token."""

    tokens_T: NDArray[np.int32]
    supervised_T: NDArray[np.bool_]


class Unusable(Exception):
    """This conversation cannot be turned into a document; the message is the reason."""


class Renderer:
    """Renders conversations and prompts with one tokenizer. Holds no state besides it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.has_marks = bool(_MARK.search(_template(tokenizer)))
        self.stop_ids = frozenset(i for i in [tokenizer.eos_token_id, *_end_of_turn_ids(tokenizer)] if i is not None)

    @property
    def decision(self) -> Decision:
        """How answers are found, for the log."""
        if not _template(self.tokenizer):
            return Decision("loss mask", "whole text", "the tokenizer has no chat template, only text can be used")
        if self.has_marks:
            return Decision("loss mask", "generation marks", "the chat template marks its answers")
        return Decision("loss mask", "prefix rendering", "the chat template has no generation marks")

    def document(self, conversation: Conversation) -> Document:
        """Tokens and loss mask.

        Raises:
            Unusable: the template fails, or the answers cannot be found exactly.
        """
        if conversation.text is not None:
            tokens = self.tokenizer(conversation.text)["input_ids"]
            return Document(np.array(tokens, np.int32), np.ones(len(tokens), np.bool_))
        text, answers = (
            self._by_marks(conversation.messages) if self.has_marks else self._by_prefixes(conversation.messages)
        )
        tokens, mask = self._encode(text, answers)
        return Document(np.array(tokens, np.int32), np.array(mask, np.bool_))

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids to answer: messages with the generation prompt, or raw text."""
        if prompt.text is not None:
            ids = list(self.tokenizer(prompt.text)["input_ids"])
        else:
            try:
                ids = self._ids(self._render(prompt.messages, generation_prompt=True))
            except Unusable as error:
                raise InputError(f"{prompt.source}: {error}") from error
        if not ids:
            raise InputError(f"{prompt.source}: the prompt has no token; remove it")
        return ids

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        return self._rendered(messages, add_generation_prompt=generation_prompt)[0]

    def _rendered(self, messages: Sequence[Message], **how: bool) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where the generation marks lie in it if they are asked for."""
        template = _template(self.tokenizer)
        if not template:
            raise Unusable("the target's tokenizer has no chat template; give plain text, or a tokenizer that has one")
        try:
            # What `apply_chat_template` does, which cannot give the text and the marks together.
            given = [{key: value for key, value in message.items() if value is not None} for message in messages]
            texts, marks = render_jinja_template(
                [given], chat_template=template, **how, **self.tokenizer.special_tokens_map
            )
        except _REFUSALS as error:
            raise Unusable(f"the chat template refuses it: {error}") from error
        return texts[0], [(start, stop) for start, stop in marks[0]] if marks else []

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _by_marks(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text and where its answers lie (characters)."""
        return self._rendered(messages, return_assistant_tokens_mask=True)

    def _by_prefixes(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The same by rendering up to each answer and through it."""
        full = self._render(messages, generation_prompt=False)
        answers: list[tuple[int, int]] = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:turn], generation_prompt=True)
            through = self._render(messages[: turn + 1], generation_prompt=False)
            if not (through.startswith(before) and full.startswith(through)):
                raise Unusable(
                    f"the chat template renders turn {turn} differently inside a longer conversation, so its tokens "
                    "cannot be told exactly; split the conversation or use a template with generation marks"
                )
            answers.append((len(before), len(through)))
        return full, answers

    def _encode(self, text: str, answers: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Tokens of the text, and the mask of the answers, each up to its last end-of-turn token."""
        if not self.tokenizer.is_fast:
            raise InputError("target.model: its tokenizer does not tell where tokens lie in the text; use a fast one")
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        mask = [False] * len(tokens)
        for start, stop in answers:
            before = self._ids(text[:start])  # what the target sees when it is served
            first = last = len(before)
            while last < len(tokens) and offsets[last][0] < stop:
                last += 1
            if tokens[:first] != before or (last > first and offsets[last - 1][1] > stop):
                raise Unusable("a token crosses the border of an answer, so serving would see other tokens")
            last = next((i + 1 for i in range(last - 1, first - 1, -1) if tokens[i] in self.stop_ids), last)
            mask[first:last] = [True] * (last - first)
        return tokens, mask


def _template(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    return template or ""


def _end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Special tokens that end a turn where the eos token does not."""
    names = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>")
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[name] for name in names if name in vocabulary]


def choose_mask_token(tokenizer: Any, embedding_rows: int, wanted: int | None) -> Decision:
    """The id that fills the slots to be drafted: the tokenizer's own mask token, else an unused reserved one, else an
    id past the tokenizer but inside the embedding.

    Raises:
        ConfigError: `wanted` is out of range, or there is no such id.
    """
    if wanted is not None:
        if not 0 <= wanted < embedding_rows:
            raise ConfigError(f"drafter.mask_token is {wanted}: the embedding has ids 0..{embedding_rows - 1}")
        return Decision("mask token", wanted, "set in the config")
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < embedding_rows:
        return Decision("mask token", tokenizer.mask_token_id, f"{tokenizer.mask_token}, the tokenizer's own")
    template = _template(tokenizer)
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        name = str(token.content)
        if index < embedding_rows and name not in template and ("reserved" in name or "unused" in name):
            return Decision("mask token", index, f"{name}, a reserved token that the template never uses")
    past = max(tokenizer.get_vocab().values()) + 1  # not the number of tokens: ids may have gaps
    if past < embedding_rows:
        return Decision("mask token", past, f"first id past the tokenizer, inside the embedding of {embedding_rows}")
    raise ConfigError(
        "drafter.mask_token: the tokenizer has no mask token, no reserved token and the embedding no spare row; "
        "set drafter.mask_token to an id that never occurs in your data"
    )
