"""From a conversation to token ids and a loss mask, by the tokenizer's own chat template and nothing else.

Where the template marks its answers (`{% generation %}`) the marks are the mask. Otherwise the conversation is
rendered up to each answer and through it, and the difference is the answer. Header text is never searched for, so text
that looks like a header inside a message cannot fool it. What has been found is verified: decoding the supervised
tokens gives the rendered answers back, and these hold what the messages say.

Many templates rewrite earlier turns: Qwen3 drops their thinking, Harmony ends them differently. Then no single text
holds every answer as it is generated, and the conversation becomes several documents, each ending where the target was
asked, so that every answer is supervised exactly once and in the context in which it is served.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import tokenizers
import transformers
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray
from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

from draftsmith.data.conversations import Conversation, Message, Prompt
from draftsmith.data.encoding import Encoder, Unusable
from draftsmith.data.jinja import used_by
from draftsmith.data.settings import TemplateSettings
from draftsmith.data.special_tokens import end_of_turn_ids, template_of
from draftsmith.decisions import Decision
from draftsmith.errors import ConfigError, InputError

__all__ = ["Document", "Renderer", "TemplateSettings", "Unusable"]

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)  # templates are code
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message, by the names templates use


@dataclass(frozen=True, eq=False, slots=True)
class Document:
    """One text as the drafter sees it. `supervised_T` marks the answers with their end-of-turn token.

    The first `prompt_tokens` are what the target is given to make the last answer; 0 if nobody asks for it.
    """

    tokens_T: NDArray[np.int32]
    supervised_T: NDArray[np.bool_]
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _View:
    """A rendered conversation up to its last answer, and where the answers to supervise lie (characters)."""

    text: str
    answers: tuple[tuple[int, int], ...]
    asked: bool  # the text before the last answer is the prompt that the target is given


class Renderer:
    """Renders conversations and prompts with one tokenizer. Holds no state besides it and what it has tokenised often.

    Raises:
        ConfigError: the template has no variable for a setting, so that it would have no effect.
    """

    def __init__(self, tokenizer: Any, settings: TemplateSettings | None = None) -> None:
        self.tokenizer = tokenizer
        self.settings = settings or TemplateSettings()
        self._template = template_of(tokenizer)
        self.has_marks = bool(_MARK.search(self._template))
        self.stop_ids = frozenset(i for i in [tokenizer.eos_token_id, *end_of_turn_ids(tokenizer)] if i is not None)
        self._stops = frozenset(tokenizer.convert_ids_to_tokens(sorted(self.stop_ids)))
        self._ends = self._stops | frozenset(tokenizer.all_special_tokens)
        self._lengths = sorted({len(token) for token in self._ends if token}, reverse=True)
        self._used = used_by(self._template)
        self._special = dict(tokenizer.special_tokens_map)
        self._arguments = self._given_settings()

    @cached_property
    def key(self) -> str:
        """Hash of all that decides what a conversation becomes, besides the conversation."""
        parts = [type(self.tokenizer).__name__, self._encoder.backend.to_str(), self._template, self._special]
        versions = [transformers.__version__, tokenizers.__version__]
        text = json.dumps([*parts, self.settings.to_json(), *versions], sort_keys=True, default=str)
        return sha256(text.encode()).hexdigest()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """How answers are found and what the template is told, for the log."""
        if not self._template:
            return (Decision("loss mask", "whole text", "the tokenizer has no chat template, only text can be used"),)
        if self.has_marks:
            made = [Decision("loss mask", "generation marks", "the chat template marks its answers")]
        else:
            made = [Decision("loss mask", "prefix rendering", "the chat template has no generation marks")]
        if "strftime_now" in self._used.variables:
            reason = "the chat template prints a date; a fixed one keeps runs repeatable"
            made.append(Decision("date in the template", self.settings.today.isoformat(), reason))
        switch = self._switch
        if switch and switch not in self.settings.arguments:
            given = self.settings.thinking
            value = "the template's own default" if given is None else given
            made.append(Decision("thinking", value, "set in the config" if given is not None else f"{switch} is unset"))
        return tuple(made)

    @property
    def _switch(self) -> str | None:
        return next((name for name in _THINKING_SWITCHES if name in self._used.variables), None)

    def _given_settings(self) -> dict[str, Any]:
        given = dict(self.settings.arguments)
        for name in given:
            if name not in self._used.variables:
                raise ConfigError(
                    f"data.template_arguments: the chat template has no variable {name}; it has "
                    f"{', '.join(sorted(self._used.variables)) or 'none'}"
                )
        if self.settings.thinking is not None:
            if self._switch is None:
                raise ConfigError("data.thinking: the chat template has no switch for thinking; leave it out")
            given.setdefault(self._switch, self.settings.thinking)
        return given

    @property
    def hint(self) -> str:
        """What may help where answers do not continue the prompt."""
        return "; data.thinking, set as the answers were made, may help" if self._switch else ""

    def documents(self, conversation: Conversation) -> tuple[Document, ...]:
        """Tokens and loss masks: one document, or several where the template rewrites earlier answers.

        Raises:
            Unusable: the template fails, or the answers cannot be found exactly.
        """
        if conversation.messages:
            views = self._views(conversation.messages, conversation.tools)
            return tuple(self._document(view) for view in views)
        if conversation.text is None:
            return (self._given_tokens(conversation),)
        if conversation.completion is None:
            tokens = self.tokenizer(conversation.text)["input_ids"]
            return (Document(np.array(tokens, np.int32), np.ones(len(tokens), np.bool_)),)
        return (self._completed(conversation.text, conversation.completion),)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids to answer: messages with the generation prompt, or raw text."""
        if prompt.ids:
            return list(prompt.ids)
        if prompt.text is not None:
            ids = list(self.tokenizer(prompt.text)["input_ids"])
        else:
            try:
                ids = self._ids(self._render(prompt.messages, prompt.tools, generation_prompt=True))
            except Unusable as error:
                raise InputError(f"{prompt.source}: {error}") from error
        if not ids:
            raise InputError(f"{prompt.source}: the prompt has no token; remove it")
        return ids

    def _given_tokens(self, conversation: Conversation) -> Document:
        """Tokens that somebody else made: only their range can be checked."""
        if max(conversation.input_ids) > self._last_id:
            raise Unusable(f"token id {max(conversation.input_ids)}: the tokenizer's ids end at {self._last_id}")
        return Document(np.array(conversation.input_ids, np.int32), np.array(conversation.loss_mask, np.bool_))

    def _document(self, view: _View) -> Document:
        tokens, mask, prompt_tokens = self._encoder.encode(view.text, view.answers)
        return Document(np.array(tokens, np.int32), mask, prompt_tokens if view.asked else 0)

    @cached_property
    def _encoder(self) -> Encoder:
        if not self.tokenizer.is_fast:
            raise InputError("target.model: its tokenizer does not tell where tokens lie in the text; use a fast one")
        return Encoder(self.tokenizer, self.hint)

    @cached_property
    def _last_id(self) -> int:
        return int(max(self.tokenizer.get_vocab().values()))

    def _completed(self, prompt: str, completion: str) -> Document:
        """Raw text whose second half is learned, with the token that ends a text."""
        before = list(self.tokenizer(prompt)["input_ids"])
        tokens = list(self.tokenizer(prompt + completion)["input_ids"])
        if tokens[: len(before)] != before:
            raise Unusable(
                "a token crosses the border of prompt and completion, so serving would see other tokens; move the "
                "space or line break between them into the completion"
            )
        end = self.tokenizer.eos_token_id
        if end is not None and tokens[-1] != end:
            tokens.append(end)
        mask = np.arange(len(tokens)) >= len(before)
        return Document(np.array(tokens, np.int32), mask, len(before))

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, generation_prompt: bool) -> str:
        return self._rendered(messages, tools, generation_prompt=generation_prompt)[0]

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Any], **how: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where the generation marks lie in it if they are asked for."""
        if not self._template:
            raise Unusable("the target's tokenizer has no chat template; give plain text, or a tokenizer that has one")
        if tools and "tools" not in self._used.variables:
            raise Unusable("its tools would be lost: the chat template does not render any")
        try:
            return self._filled([self._given(message) for message in messages], list(tools) or None, **how)
        except _REFUSALS as error:
            raise Unusable(f"the chat template refuses it: {' '.join(str(error).split())}") from error

    def _filled(
        self, messages: list[Message], tools: list[Any] | None, generation_prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """What `apply_chat_template` does inside, which cannot give the text and the marks together."""
        template = _compile_jinja_template(self._template)
        given = self._special | self._arguments | {"strftime_now": self.settings.today.strftime}
        if not marks:
            asked = {"messages": messages, "tools": tools, "documents": None}
            return template.render(**asked, add_generation_prompt=generation_prompt, **given), []
        text, places = _render_with_assistant_indices(template, messages, tools, None, generation_prompt, **given)
        return text, [(start, stop) for start, stop in places]

    def _given(self, message: Message) -> Message:
        """A message under the names that this template knows."""
        given = {key: value for key, value in message.items() if value is not None}
        reasoning = next((key for key in _REASONING if key in given), None)
        if reasoning is not None and reasoning not in self._used.names:
            known = next((key for key in _REASONING if key in self._used.names), reasoning)
            given[known] = given.pop(reasoning)
        if "tool_calls" in given:
            given["tool_calls"] = [self._called(call) for call in given["tool_calls"]]
        return given

    def _called(self, call: Any) -> Any:
        """A tool call inside `function`, with its arguments as the template takes them: as an object or as JSON."""
        if not isinstance(call, dict):
            return call
        call = call if "function" in call else {"type": "function", "function": call}
        function = call["function"]
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if self._used.call_arguments == "object" and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return call
        elif self._used.call_arguments == "json" and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        else:
            return call
        return call | {"function": function | {"arguments": arguments}}

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _views(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[_View]:
        """Texts that together hold every answer once, as it is generated. Turns after the last answer are left out:
        they teach nothing."""
        missing = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        find = self._by_marks if self.has_marks else _Prefixes(self, messages, tools)
        views: list[_View] = []
        while missing:
            last = missing[-1]
            text, found = find(messages[: last + 1], tools, missing)
            if last not in found:
                raise Unusable(
                    f"the chat template does not show all of turn {last} (content, thinking and calls, unchanged), so "
                    "it would be taught without that; use another template, or remove it from the data"
                )
            answers = tuple(found[turn] for turn in missing if turn in found)
            views.append(_View(text, answers, self._asks(messages, tools, last, text[: answers[-1][0]])))
            missing = [turn for turn in missing if turn not in found]
        return views[::-1]

    def _asks(self, messages: Sequence[Message], tools: Sequence[Any], last: int, before: str) -> bool:
        """Whether the target, asked for this answer, is given exactly `before`."""
        if last == 0 or messages[last - 1]["role"] not in ("user", "tool"):
            return False
        return not self.has_marks or self._render(messages[:last], tools, generation_prompt=True) == before

    def _by_marks(
        self, messages: Sequence[Message], tools: Sequence[Any], wanted: Sequence[int]
    ) -> tuple[str, dict[int, tuple[int, int]]]:
        """The rendered text, and where it shows those of the wanted answers that it shows whole."""
        text, marks = self._rendered(messages, tools, marks=True)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marks) != len(turns):  # some mark the end of the text too
            marks = [(start, stop) for start, stop in marks if text[start:stop].strip() not in self._ends]
        if len(marks) != len(turns):
            raise Unusable(
                f"the chat template marks {len(marks)} answers for {len(turns)} assistant turns; mend its generation "
                "marks, or remove them to have answers found by rendering prefixes"
            )
        places = dict(zip(turns, marks, strict=True))
        found = {turn: self._shown(messages, turn, text, *places[turn]) for turn in wanted}
        return text, {turn: place for turn, place in found.items() if place is not None}

    def _shown(
        self, messages: Sequence[Message], turn: int, text: str, start: int, stop: int
    ) -> tuple[int, int] | None:
        """Where an answer that the template renders at `start:stop` begins and ends; None if it is not all there.

        Its end is behind the end-of-turn token, if nothing but white space and other special tokens follows: those
        belong to the template, not to the answer.
        """
        shown, parts = text[start:stop], [part for part in _parts(messages[turn]) if part]
        if not all(part in shown for part in parts):
            return None
        for find in (shown.rfind, shown.find):  # the second if the answer itself ends like a turn
            said = max((find(part) + len(part) for part in parts), default=0)
            end = self._end_of_turn(shown, said)
            if end:
                return start, start + end
        return start, stop

    def _end_of_turn(self, shown: str, said: int) -> int:
        """Where the end-of-turn token behind `said` ends: the first that stops the target, else the last special
        token; 0 if there is none at the end of the text."""
        last = inner = 0
        end = len(shown.rstrip())
        while special := next((n for n in self._lengths if end - n >= said and shown[end - n : end] in self._ends), 0):
            last = last or end
            inner = end if shown[end - special : end] in self._stops else inner
            end = len(shown[: end - special].rstrip())
        return inner or last


class _Prefixes:
    """Finds answers of one conversation by rendering up to each of them and through it, each prefix once."""

    def __init__(self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any]) -> None:
        self._renderer, self._messages, self._tools = renderer, messages, tools
        self._kept: dict[tuple[int, bool], str] = {}

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Any], wanted: Sequence[int]
    ) -> tuple[str, dict[int, tuple[int, int]]]:
        """The rendered messages, and where they show those of the wanted answers that they show whole."""
        text = self._prefix(len(messages), False)
        found: dict[int, tuple[int, int]] = {}
        for turn in wanted:
            before, through = self._prefix(turn, True), self._prefix(turn + 1, False)
            if not through.startswith(before):
                raise Unusable(
                    f"the chat template renders turn {turn} without the prompt that asks for it, so its tokens cannot "
                    "be told exactly; use a template with generation marks, or data rendered to input_ids and "
                    f"loss_mask{self._renderer.hint}"
                )
            place = self._renderer._shown(self._messages, turn, through, len(before), len(through))
            if place is not None and text.startswith(through[: place[1]]):
                found[turn] = place
        return text, found

    def _prefix(self, stop: int, generation_prompt: bool) -> str:
        key = (stop, generation_prompt)
        if key not in self._kept:
            messages = self._messages[:stop]
            self._kept[key] = self._renderer._render(messages, self._tools, generation_prompt=generation_prompt)
        return self._kept[key]


def _parts(message: Message) -> Iterator[str]:
    """What the rendering of an answer must hold. White space at the borders is the template's."""
    thought, end, said = str(message["content"]).rpartition("</think>")
    yield said.strip()
    if end:
        yield thought.strip().removeprefix("<think>").strip()
    for key in _REASONING:
        if isinstance(message.get(key), str):
            yield message[key].strip()
    for call in message.get("tool_calls") or ():
        name = call.get("function", call).get("name") if isinstance(call, dict) else None
        yield str(name or "")
