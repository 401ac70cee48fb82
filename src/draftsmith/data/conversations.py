"""Conversations as people have them, one JSON object per line. Every line becomes a `Conversation` or a `Reject`."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from draftsmith.data.promptsets import PROMPT_SETS, PromptSet
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
_ASKING = ("user", "tool")  # roles of a turn that the target answers


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

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"

    def to_json(self) -> str:
        return json.dumps({"file": self.file, "line": self.line, "reason": self.reason}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Something to answer: messages that end in a user or tool turn, or raw text."""

    messages: tuple[Message, ...] = ()
    text: str | None = None
    reference: str | None = None
    source: str = field(default="prompts", compare=False)  # file:line, for messages

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


def _lines(path: Path, key: str) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield number, raw
    except (OSError, EOFError, zlib.error) as error:
        cause = getattr(error, "strerror", None) or error
        raise InputError(f"{key}: {path} cannot be read: {cause}; check the path and the file") from error


def _parsed(raw: bytes) -> tuple[Any, str | None]:
    """A line's JSON, and what is wrong with it or None."""
    try:
        data = json.loads(raw.decode("utf-8-sig"))
        json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start} of the line"
    except UnicodeEncodeError:
        return None, "half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    except (ValueError, RecursionError) as error:
        return None, f"not usable JSON: {error}"
    return data, None


def _conversation(file: str, line: int, raw: bytes) -> Conversation | Reject:
    data, problem = _parsed(raw)
    if problem:
        return Reject(file, line, problem)
    if not isinstance(data, dict):
        return Reject(file, line, f"a {type(data).__name__} instead of an object")
    for key in ("system", "tools", "functions"):
        if data.get(key):
            return Reject(file, line, f"its key {key} would be lost: only what stands in messages is rendered")
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
        found = [_prompt(f"{path}:{line}", raw, known) for line, raw in _lines(path, "prompts")]
        if not found:
            raise InputError(f"prompts: {path} holds no prompt; leave it out or fill it")
        prompts += found[:limit]
    return prompts


def _prompt(source: str, raw: bytes, known: PromptSet | None) -> Prompt:
    data, problem = _parsed(raw)
    if problem is None and known is not None:
        try:
            data = known.line(data)
        except (KeyError, TypeError, IndexError) as error:
            problem = f"not what {known.package} is known to hold ({error!r}); install another version of it"
    if problem is None:
        problem = _prompt_problem(data)
    if problem:
        raise InputError(f"{source}: {problem}")
    return Prompt(tuple(data.get("messages", ())), data.get("prompt"), data.get("reference"), source)


def _prompt_problem(data: Any) -> str | None:
    if not isinstance(data, dict) or ("messages" in data) == ("prompt" in data):
        return 'give either "messages" or "prompt"'
    if not isinstance(data.get("reference"), str | None):
        return "reference is not a string"
    if "prompt" in data:
        return None if isinstance(data["prompt"], str) and data["prompt"] else "prompt is empty or not a string"
    problem = message_problem(data["messages"])
    if problem is None and data["messages"][-1]["role"] not in _ASKING:
        problem = "messages must end in a user or tool turn; put a reference answer into reference"
    return problem


def hold_out(conversations: Iterable[Conversation], share: float, most: int) -> frozenset[str]:
    """Content hashes of the chats to hold out: the min(`most`, `share`) with the smallest hash that can be asked.

    By content, so that adding, removing or shuffling other conversations hardly changes the choice, and every copy of
    a held-out chat is held out.
    """
    chats = [c for c in conversations if c.messages]
    hashes = sorted({c.content_hash for c in chats if as_prompt(c) is not None})
    return frozenset(hashes[: min(most, int(len(chats) * share))])


def as_prompt(conversation: Conversation) -> Prompt | None:
    """A chat up to its last answer, which becomes the reference; None if nothing is asked there."""
    messages = conversation.messages
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=0)
    if last == 0 or messages[last - 1]["role"] not in _ASKING:
        return None
    source = f"{conversation.file}:{conversation.line}"
    return Prompt(messages[:last], reference=str(messages[last]["content"]), source=source)
