"""Conversations to learn from and prompts to answer, as people have them."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.forms import (
    Conversation,
    Malformed,
    Message,
    Reject,
    conversation,
    parsed,
    read_messages,
    read_tools,
)
from draftsmith.data.hub import find_files
from draftsmith.data.promptsets import PROMPT_SETS, PromptSet
from draftsmith.data.sources import Chunk, Source, json_lines, open_source, read_chunks
from draftsmith.embedded import PROMPTS
from draftsmith.errors import InputError

__all__ = ["Conversation", "Message", "Prompt", "Reject", "as_prompt", "hold_out", "read_conversations", "read_prompts"]

_ASKING = ("user", "tool")  # roles of a turn that the target answers


@dataclass(frozen=True, slots=True)
class Prompt:
    """Something to answer: messages that end in a user or tool turn, raw text, or token ids rendered before."""

    messages: tuple[Message, ...] = ()
    text: str | None = None
    reference: str | None = None
    source: str = field(default="prompts", compare=False)  # file:line, for messages
    tools: tuple[Any, ...] = ()
    ids: tuple[int, ...] = ()

    def to_json(self) -> str:
        body: dict[str, Any] = {"prompt": self.text} if self.text is not None else {"messages": list(self.messages)}
        if self.tools:
            body["tools"] = list(self.tools)
        if self.reference is not None:
            body["reference"] = self.reference
        return json.dumps(body, ensure_ascii=False)


def find_sources(names: Sequence[str], form: str | None = None, key: str = "data.train") -> list[Source]:
    """The files that names stand for (a file, a folder, a hub data set, `demo`), and how each is read.

    Raises:
        InputError, ConfigError: a name leads nowhere or a file cannot be read.
    """
    return [open_source(shown, path, form, key) for name in names for shown, path in find_files(name, key)]


def read_conversations(names: Sequence[str], form: str | None = None) -> Iterator[Conversation | Reject]:
    """Every record of every file, in order.

    Raises:
        InputError: a file cannot be read.
    """
    for source in find_sources(names, form):
        for chunk in read_chunks(source):
            yield from chunk_conversations(chunk)


def chunk_conversations(chunk: Chunk) -> Iterator[Conversation | Reject]:
    """The records of a chunk."""
    source = chunk.source
    for line, raw in chunk.records:
        yield conversation(source.name, line, raw, source.form, strict=source.strict)


def read_prompts(files: Iterable[str], limit: int | None = None) -> list[Prompt]:
    """Prompt files: `{"messages": [...]}` or `{"prompt": "..."}` per line, a reference answer in `reference`.

    `demo` stands for the embedded ones, a key of `PROMPT_SETS` for a public benchmark. `limit` cuts each of them.

    Raises:
        InputError: a file or a line cannot be used; the line is named.
    """
    prompts = []
    for name in files:
        known = PROMPT_SETS.get(name)
        path = PROMPTS if name == "demo" else known.path(name) if known else Path(name)
        found = [_prompt(f"{path}:{line}", raw, known) for line, raw in json_lines(path, "prompts")]
        if not found:
            raise InputError(f"prompts: {path} holds no prompt; leave it out or fill it")
        prompts += found[:limit]
    return prompts


def _prompt(source: str, raw: bytes, known: PromptSet | None) -> Prompt:
    try:
        data = parsed(raw)
        if known is not None:
            data = _line_of(known, data)
        if not isinstance(data, dict) or ("messages" in data) == ("prompt" in data):
            raise Malformed('give either "messages" or "prompt"')
        reference = data.get("reference")
        if not isinstance(reference, str | None):
            raise Malformed("reference is not a string")
        if "prompt" in data:
            if not isinstance(data["prompt"], str) or not data["prompt"]:
                raise Malformed("prompt is empty or not a string")
            return Prompt((), data["prompt"], reference, source)
        messages = read_messages(data["messages"])
        if messages[-1]["role"] not in _ASKING:
            raise Malformed("messages must end in a user or tool turn; put a reference answer into reference")
        return Prompt(messages, None, reference, source, read_tools(data.get("tools")))
    except Malformed as error:
        raise InputError(f"{source}: {error}") from None


def _line_of(known: PromptSet, data: Any) -> Any:
    try:
        return known.line(data)
    except (KeyError, TypeError, IndexError) as error:
        raise Malformed(
            f"not what {known.package} is known to hold ({error!r}); install another version of it"
        ) from None


def hold_out(chats: Sequence[tuple[str, bool]], share: float, most: int) -> frozenset[str]:
    """Content hashes of the chats to hold out: the min(`most`, `share`) with the smallest hash that can be asked.

    By content, so that adding, removing or shuffling other conversations hardly changes the choice, and every copy of
    a held-out chat is held out.

    Args:
        chats: content hash of every chat, and whether its last answer can be asked for.
    """
    hashes = sorted({content for content, askable in chats if askable})
    return frozenset(hashes[: min(most, int(len(chats) * share))])


def as_prompt(conversation: Conversation) -> Prompt | None:
    """A chat up to its last answer, which becomes the reference; None if nothing is asked there."""
    messages = conversation.messages
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=0)
    if last == 0 or messages[last - 1]["role"] not in _ASKING:
        return None
    source = f"{conversation.file}:{conversation.line}"
    reference = str(messages[last]["content"])
    return Prompt(messages[:last], reference=reference, source=source, tools=conversation.tools)
