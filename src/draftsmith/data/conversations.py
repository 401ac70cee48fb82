"""Conversations as people have them, one JSON object per line. Every line becomes a `Conversation` or a `Reject`."""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from draftsmith.embedded import CONVERSATIONS, PROMPTS
from draftsmith.errors import InputError

Message = dict[str, Any]

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages, or plain text without a template. `file` and `line` (1-based) say where it stood."""

    file: str
    line: int
    messages: tuple[Message, ...] = ()
    text: str | None = None

    @property
    def content_hash(self) -> str:
        """The same conversation has the same hash, wherever it stands."""
        return sha256(json.dumps([self.messages, self.text], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Reject:
    """A line that cannot be used, and why. Written to `rejects.jsonl`."""

    file: str
    line: int
    reason: str

    def to_json(self) -> str:
        return json.dumps({"file": self.file, "line": self.line, "reason": self.reason}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Something to answer: messages that end in a user or tool turn, or raw text."""

    messages: tuple[Message, ...] = ()
    text: str | None = None
    reference: str | None = None

    def to_json(self) -> str:
        body: dict[str, Any] = {"prompt": self.text} if self.text is not None else {"messages": list(self.messages)}
        if self.reference is not None:
            body["reference"] = self.reference
        return json.dumps(body, ensure_ascii=False)


def read_conversations(files: Iterable[str]) -> Iterator[Conversation | Reject]:
    """All lines of all files, in order. `demo` stands for the embedded conversations; `.gz` is unpacked.

    Raises:
        InputError: a file cannot be read.
    """
    for name in files:
        path = CONVERSATIONS if name == "demo" else Path(name)
        for line, text in _lines(path, "data.train"):
            yield _conversation(name, line, text)


def _lines(path: Path, key: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except (OSError, EOFError) as error:
        raise InputError(f"{key}: {path} cannot be read: {error.__class__.__name__}: {error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{key}: {path} is not UTF-8 at byte {error.start}; convert it first") from error


def _conversation(file: str, line: int, text: str) -> Conversation | Reject:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        return Reject(file, line, f"not JSON: {error.msg} at column {error.colno}")
    if not isinstance(data, dict):
        return Reject(file, line, f"a {type(data).__name__} instead of an object")
    if "messages" in data:
        return _chat(file, line, data["messages"])
    if "conversations" in data:
        return _chat(file, line, _from_sharegpt(data["conversations"]))
    if "text" in data:
        if not isinstance(data["text"], str) or not data["text"]:
            return Reject(file, line, "text is empty or not a string")
        return Conversation(file, line, text=data["text"])
    return Reject(file, line, f"none of messages, conversations, text among its keys {sorted(data)[:6]}")


def _from_sharegpt(turns: Any) -> Any:
    """ShareGPT turns (`from`, `value`) as messages; what is not understood passes through and is refused later."""
    if not isinstance(turns, list):
        return turns
    return [
        {"role": _SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
        if isinstance(turn, dict) and isinstance(turn.get("from"), str) and "value" in turn
        else turn
        for turn in turns
    ]


def _chat(file: str, line: int, messages: Any) -> Conversation | Reject:
    problem = message_problem(messages)
    if problem is None and not any(m["role"] == "assistant" for m in messages):
        problem = "no assistant turn, so nothing to learn"
    return Reject(file, line, problem) if problem else Conversation(file, line, messages=tuple(messages))


def message_problem(messages: Any) -> str | None:
    """What is wrong with a list of messages, or None."""
    if not isinstance(messages, list) or not messages:
        return "messages is not a list with at least one turn"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"turn {number} has no role"
        if message["role"] not in ("system", "developer", "user", "assistant", "tool"):
            return f"turn {number} has the unknown role {message['role']!r}"
        if not isinstance(message.get("content"), str):
            return f"turn {number} ({message['role']}) has no text content"
    return None


def read_prompts(files: Iterable[str]) -> list[Prompt]:
    """Prompt files: `{"messages": [...]}` or `{"prompt": "..."}` per line, a reference answer in `reference`.

    Raises:
        InputError: a file or a line cannot be used; the line is named.
    """
    prompts = []
    for name in files:
        path = PROMPTS if name == "demo" else Path(name)
        for line, text in _lines(path, "prompts"):
            prompts.append(_prompt(path, line, text))
        if not prompts:
            raise InputError(f"prompts: {path} holds no prompt")
    return prompts


def _prompt(path: Path, line: int, text: str) -> Prompt:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{line}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(data, dict) or ("messages" in data) == ("prompt" in data):
        raise InputError(f'{path}:{line}: give either "messages" or "prompt"')
    reference = data.get("reference")
    if "prompt" in data:
        if not isinstance(data["prompt"], str) or not data["prompt"]:
            raise InputError(f"{path}:{line}: prompt is empty or not a string")
        return Prompt(text=data["prompt"], reference=reference)
    problem = message_problem(data["messages"])
    if problem is None and data["messages"][-1]["role"] not in ("user", "tool"):
        problem = "messages must end in a user or tool turn; put a reference answer into reference"
    if problem:
        raise InputError(f"{path}:{line}: {problem}")
    return Prompt(messages=tuple(data["messages"]), reference=reference)


def hold_out(conversations: list[Conversation], count: int) -> tuple[list[Conversation], list[Conversation]]:
    """Splits off the `count` chats with the smallest content hash, with every copy of them. Returns (train, held out).

    By content, so that adding, removing or shuffling other conversations hardly changes the choice.
    """
    hashes = sorted({c.content_hash for c in conversations if c.messages})
    held = set(hashes[:count])
    train = [c for c in conversations if not c.messages or c.content_hash not in held]
    return train, [c for c in conversations if c.messages and c.content_hash in held]


def as_prompt(conversation: Conversation) -> Prompt:
    """A held-out chat up to its last answer, which becomes the reference."""
    last = max(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
    return Prompt(messages=conversation.messages[:last], reference=str(conversation.messages[last]["content"]))
