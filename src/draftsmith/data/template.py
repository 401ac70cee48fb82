"""From a conversation to token ids and a loss mask, by the tokenizer's own chat template and nothing else.

Where the template marks its answers (`{% generation %}`) the marks are the mask. Otherwise the conversation is
rendered up to each answer and through it, and the difference is the answer: exact, or the conversation is refused.
Header text is never searched for, so text that looks like a header inside a message cannot fool it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from draftsmith.data.conversations import Conversation, Message, Prompt
from draftsmith.decisions import Decision
from draftsmith.errors import InputError


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
        self.has_marks = "{% generation %}" in _template(tokenizer) or "{%- generation" in _template(tokenizer)
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
        if self.has_marks:
            tokens, mask = self._by_marks(conversation.messages)
        else:
            tokens, mask = self._by_prefixes(conversation.messages)
        return Document(np.array(tokens, np.int32), np.array(mask, np.bool_))

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids to answer: messages with the generation prompt, or raw text."""
        if prompt.text is not None:
            ids = list(self.tokenizer(prompt.text)["input_ids"])
        else:
            try:
                ids = self._tokenize(self._render(prompt.messages, generation_prompt=True))["input_ids"]
            except Unusable as error:
                raise InputError(f"prompts: {error}") from error
        if not ids:
            raise InputError("prompts: a prompt has no token")
        return list(ids)

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        if not _template(self.tokenizer):
            raise Unusable("the target's tokenizer has no chat template; give plain text, or a tokenizer that has one")
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise Unusable(f"the chat template refuses it: {error}") from error
        return text

    def _tokenize(self, text: str, **more: Any) -> Any:
        return self.tokenizer(text, add_special_tokens=False, **more)

    def _by_marks(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        try:
            out = self.tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise Unusable(f"the chat template refuses it: {error}") from error
        return out["input_ids"], [bool(m) for m in out["assistant_masks"]]

    def _by_prefixes(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
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
        encoded = self._tokenize(full, return_offsets_mapping=True)
        tokens, offsets = encoded["input_ids"], encoded["offset_mapping"]
        mask = [False] * len(tokens)
        for start, stop in answers:
            inside = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
            if any(offsets[i][0] < start or offsets[i][1] > stop for i in inside):
                raise Unusable("a token crosses the border of an answer, so serving would see other tokens")
            ends = [i for i in inside if tokens[i] in self.stop_ids]
            for i in inside if not ends else range(inside[0], ends[-1] + 1):
                mask[i] = True
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
        InputError: `wanted` is out of range, or there is no such id.
    """
    if wanted is not None:
        if not 0 <= wanted < embedding_rows:
            raise InputError(f"drafter.mask_token is {wanted}: the embedding has ids 0..{embedding_rows - 1}")
        return Decision("mask token", wanted, "set in the config")
    if tokenizer.mask_token_id is not None:
        return Decision("mask token", tokenizer.mask_token_id, f"{tokenizer.mask_token}, the tokenizer's own")
    template = _template(tokenizer)
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        name = str(token.content)
        if index < embedding_rows and name not in template and ("reserved" in name or "unused" in name):
            return Decision("mask token", index, f"{name}, a reserved token that the template never uses")
    if len(tokenizer) < embedding_rows:
        reason = f"first id past the tokenizer, inside the embedding of {embedding_rows}"
        return Decision("mask token", len(tokenizer), reason)
    raise InputError(
        "drafter.mask_token: the tokenizer has no mask token, no reserved token and the embedding no spare row; "
        "set drafter.mask_token to an id that never occurs in your data"
    )
