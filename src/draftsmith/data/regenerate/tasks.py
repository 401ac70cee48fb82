"""What is asked and what becomes of it. Every input record ends as one outcome: success, error or skipped."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from draftsmith.data.conversations import find_sources
from draftsmith.data.forms import Malformed, Message, Reject, conversation, detect, parsed, read_messages
from draftsmith.data.sources import Source, read_chunks

SUCCESS, ERROR, SKIPPED = "success", "error", "skipped"
_ASKING = ("user", "tool")  # roles of a turn that the target answers


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn. Temperature 0 is greedy; None leaves a setting to the model or server."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def seed_of(self, number: int, turn: int) -> int | None:
        """The seed of one answer: the same however often and in whatever order it is asked."""
        return None if self.seed is None else (self.seed + 1_000_003 * number + turn) % 2**31


@dataclass(frozen=True, slots=True)
class Task:
    """A record to answer: `messages` with every assistant turn to be replaced, or a raw `prompt`."""

    number: int  # its place among all records of all files, from 0
    file: str
    line: int
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    prompt: str | None = None

    @property
    def key(self) -> str:
        """Changes with what is asked: an outcome belongs to the record it was made for."""
        answered = [m if m["role"] != "assistant" else None for m in self.messages]
        return sha256(json.dumps([answered, self.tools, self.prompt], sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Context:
    """What the target is given to make one answer. `turn` counts the answers of the task."""

    task: Task
    turn: int
    messages: tuple[Message, ...] = ()

    @property
    def name(self) -> str:
        return f"answer {self.turn + 1}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target wrote, without its end-of-turn token. `finish`: stop, length or tool_calls."""

    content: str
    finish: str
    tokens: int
    more: Mapping[str, Any] = field(default_factory=dict)  # reasoning, tool calls


class Failed(Exception):
    """This record gets no answer; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a record ended. `record` is what goes into the answers; `key` is the task's, empty if there was none."""

    number: int
    file: str
    line: int
    key: str
    status: str
    reason: str = ""
    record: Mapping[str, Any] | None = None
    tokens: int = 0


def read_tasks(names: Sequence[str], form: str | None = None) -> Iterator[Task | Outcome]:
    """Every record of every file, in order: something to answer, or skipped with the reason.

    Raises:
        InputError, ConfigError: a file cannot be read.
    """
    number = 0
    for source in find_sources(names, form, "data regenerate"):
        for chunk in read_chunks(source, "data regenerate"):
            for line, raw in chunk.records:
                try:
                    yield Task(number, source.name, line, **_asked(source, line, raw))
                except Malformed as error:
                    yield Outcome(number, source.name, line, "", SKIPPED, str(error))
                number += 1


def _asked(source: Source, line: int, raw: bytes) -> dict[str, Any]:
    """Messages and tools, or a raw prompt.

    Raises:
        Malformed: the record cannot be read, or has nothing to answer.
    """
    data = parsed(raw)
    is_raw = isinstance(data, dict) and isinstance(data.get("prompt"), str) and detect(data) in (None, "completion")
    if is_raw and source.form != "completion-chat":
        return _raw(data["prompt"])
    found = conversation(source.name, line, _with_an_end(data, raw), source.form, strict=source.strict)
    if isinstance(found, Reject):
        raise Malformed(found.reason)
    if not found.messages:
        raise Malformed("plain text or token ids hold no turn to answer")
    messages = found.messages
    for turn, message in enumerate(messages):
        if message["role"] == "assistant" and (turn == 0 or messages[turn - 1]["role"] not in _ASKING):
            raise Malformed(
                f"turn {turn} is an answer that no user or tool turn asks for; split the conversation there"
            )
        if message["role"] == "assistant" and message.get("tool_calls") and turn + 1 < len(messages):
            raise Malformed(f"what follows turn {turn} depends on its tool calls, which the target may not make again")
    return {"messages": messages, "tools": found.tools}


def _raw(prompt: str) -> dict[str, Any]:
    if not prompt:
        raise Malformed("prompt is empty")
    return {"prompt": prompt}


def _with_an_end(data: Any, raw: bytes) -> bytes:
    """The record with an answer to be made at its end, if it is a chat that ends in a question."""
    for key in ("messages", "conversations"):
        turns = data.get(key) if isinstance(data, dict) else None
        if isinstance(turns, list) and turns and read_messages(turns)[-1]["role"] in _ASKING:
            return json.dumps({**data, key: [*turns, {"role": "assistant", "content": ""}]}).encode()
    return raw


def dialogue(task: Task, sampling: Sampling) -> Generator[Context, Answer, Outcome]:
    """Yields what is to be answered, turn by turn, is sent the answers, and returns the outcome.

    Later turns are asked in the context of the new answers. An answer that was cut is never kept: it would teach an end
    where there is none.
    """
    said: list[Message] = []
    tokens = turn = 0
    if task.prompt is not None:
        answer = yield Context(task, 0)
        _check(answer, "the answer", sampling)
        record: dict[str, Any] = {"prompt": task.prompt, "completion": answer.content}
        return Outcome(task.number, task.file, task.line, task.key, SUCCESS, "", record, answer.tokens)
    for place, message in enumerate(task.messages):
        if message["role"] != "assistant":
            said.append(message)
            continue
        context = Context(task, turn, tuple(said))
        answer = yield context
        _check(answer, context.name, sampling)
        if "tool_calls" in answer.more and place + 1 < len(task.messages):
            raise Failed(f"{context.name} calls a tool, but a user turn follows")
        said.append({"role": "assistant", "content": answer.content, **answer.more})
        tokens, turn = tokens + answer.tokens, turn + 1
    record = {"messages": said} | ({"tools": list(task.tools)} if task.tools else {})
    return Outcome(task.number, task.file, task.line, task.key, SUCCESS, "", record, tokens)


def _check(answer: Answer, name: str, sampling: Sampling) -> None:
    if answer.finish == "length":
        raise Failed(f"{name} was cut at {answer.tokens} tokens; raise --max-new-tokens {sampling.max_new_tokens}")
    if answer.finish not in ("stop", "tool_calls"):
        raise Failed(f"{name} ended by {answer.finish!r}")
    if not answer.content.strip() and "tool_calls" not in answer.more:
        raise Failed(f"{name} is empty")


def failed(task: Task, reason: str) -> Outcome:
    """The outcome of a task that got no answer."""
    return Outcome(task.number, task.file, task.line, task.key, ERROR, reason)
