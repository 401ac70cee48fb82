"""A record in any of the forms people have becomes a `Conversation`, or a `Reject` that says why not.

Nothing is rendered here: roles get their usual names, content parts become text, everything else of a turn (tool
calls, reasoning) stays as it is for the chat template. What would be lost on the way is a reason to refuse.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
MAX_RECORD_BYTES = 64 * 2**20
TEXT_PARTS = ("text", "input_text", "output_text")


class Malformed(Exception):
    """A record that cannot be used; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One of: chat `messages` (with `tools`), a `text`, a `text` with its `completion`, or `input_ids` with a
    `loss_mask`. `file` and `line` (1-based; the row of a table) say where it stood."""

    file: str
    line: int
    messages: tuple[Message, ...] = ()
    text: str | None = None
    completion: str | None = None
    tools: tuple[Any, ...] = ()
    input_ids: tuple[int, ...] = ()
    loss_mask: tuple[bool, ...] = ()

    @property
    def content_hash(self) -> str:
        """The same conversation has the same hash, wherever it stands."""
        content: list[Any] = [self.messages, self.text]
        more = [self.completion, self.tools, self.input_ids, self.loss_mask]
        return sha256(json.dumps(content + more if any(more) else content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that cannot be used, and why. Written to `rejects.jsonl`."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"

    def to_json(self) -> str:
        return json.dumps({"file": self.file, "line": self.line, "reason": self.reason}, ensure_ascii=False)


def parsed(raw: bytes) -> Any:
    """The JSON of one record.

    Raises:
        Malformed: it is not JSON, not UTF-8, not text that a tokenizer can take, or has a key twice.
    """
    if len(raw) > MAX_RECORD_BYTES:
        raise Malformed(f"longer than {MAX_RECORD_BYTES // 2**20} MiB; split it")
    try:
        data = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_without_repetition)
        if b"\\u" in raw:
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise Malformed(f"not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 at byte {error.start} of the line") from None
    except UnicodeEncodeError:
        raise Malformed("half of a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not usable JSON: {error}") from None
    return data


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Malformed(f"its key {twice!r} stands there twice, and one of the two would be lost")
    return data


def detect(data: Any) -> str | None:
    """The form whose keys a record has: the first of `FORMS` in order, None if there is none."""
    if not isinstance(data, dict):
        return None
    return next((name for name, form in FORMS.items() if form.found and all(key in data for key in form.keys)), None)


def conversation(file: str, line: int, raw: bytes, form: str, *, strict: bool = False) -> Conversation | Reject:
    """One record.

    Args:
        raw: its JSON, UTF-8.
        form: the file's form. A record without that form's keys is read by the keys it has.
        strict: the form was asked for, so that other records are refused.
    """
    try:
        data = parsed(raw)
        if not isinstance(data, dict):
            raise Malformed(f"a {type(data).__name__} instead of an object")
        if not all(key in data for key in FORMS[form].keys):
            own = None if strict else detect(data)
            if own is None:
                wanted = FORMS[form].keys if strict else sorted({key for f in FORMS.values() for key in f.keys[:1]})
                raise Malformed(f"none of {', '.join(wanted)} among its keys {sorted(data)[:6]}")
            form = own
        return Conversation(file, line, **FORMS[form].read(data))
    except Malformed as error:
        return Reject(file, line, str(error))


def _messages_form(data: Mapping[str, Any]) -> dict[str, Any]:
    return _chat(data, data["messages"])


def _sharegpt(data: Mapping[str, Any]) -> dict[str, Any]:
    return _chat(data, data["conversations"])


def _chat(data: Mapping[str, Any], turns: Any) -> dict[str, Any]:
    """Turns with what stands beside them: a system prompt, tools."""
    messages = read_messages(turns)
    if data.get("functions"):
        raise Malformed("its key functions would be lost: describe them in tools, as JSON schemas")
    system = data.get("system")
    if system:
        if not isinstance(system, str):
            raise Malformed("its key system is not a string")
        if messages[0]["role"] in ("system", "developer"):
            raise Malformed("it has two system prompts: its key system and the first turn; keep one")
        messages = ({"role": "system", "content": system}, *messages)
    if not any(m["role"] == "assistant" for m in messages):
        raise Malformed("no assistant turn, so nothing to learn")
    return {"messages": messages, "tools": read_tools(data.get("tools"))}


def read_tools(tools: Any) -> tuple[Any, ...]:
    """Tool descriptions: a list of JSON schemas, or that list as a string (as tables have it).

    Raises:
        Malformed: it is something else.
    """
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise Malformed("its tools are a string that is not JSON") from None
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Malformed("its tools are not a list of objects")
    return tuple(tools)


def read_messages(turns: Any) -> tuple[Message, ...]:
    """Turns with `role` and `content`, or `from` and `value`, as messages with usual roles and text contents.

    Raises:
        Malformed: says which turn (from 0) and why.
    """
    if not isinstance(turns, list) or not turns:
        raise Malformed("messages is not a list with at least one turn")
    return tuple(_message(number, turn) for number, turn in enumerate(turns))


def _message(number: int, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise Malformed(f"turn {number} is a {type(turn).__name__}, not an object")
    named = "role" if "role" in turn else "from"
    role, content = turn.get(named), turn.get("content" if "content" in turn else "value")
    if not isinstance(role, str):
        raise Malformed(f"turn {number} has no role")
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_called(number, content)]}
    if role not in ROLES:
        raise Malformed(f"turn {number} has the unknown role {role!r}; known are {', '.join(ROLES)}")
    rest = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    if "function_call" in rest:
        raise Malformed(f"turn {number} has a function_call, which templates do not render; give it as tool_calls")
    where = f"turn {number} ({ROLES[role]})"
    return {"role": ROLES[role], "content": _text(where, content, may_lack="tool_calls" in rest), **rest}


def _called(number: int, value: Any) -> Message:
    """A ShareGPT turn `function_call`: the call as a JSON string."""
    try:
        call = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise Malformed(f"turn {number} (function_call) is not a JSON object with name and arguments")
    return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}


def _text(where: str, content: Any, *, may_lack: bool) -> str:
    """A turn's content as text; parts of text are joined, other parts refused by their name."""
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if not isinstance(content, list):
        raise Malformed(f"{where} has no text content")
    for part in content:
        kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else type(part).__name__
        if kind not in (*TEXT_PARTS, "str"):
            raise Malformed(f"{where} has a part of type {kind!r}; only text can be learned, remove the conversation")
        if kind != "str" and not isinstance(part.get("text"), str):
            raise Malformed(f"{where} has a text part without text")
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def _instruction(data: Mapping[str, Any]) -> dict[str, Any]:
    """Alpaca's form: the input, if there is one, follows the instruction after an empty line."""
    if data.get("history"):
        raise Malformed("its key history would be lost: write the conversation as messages")
    asked = [_string(data, "instruction"), _string(data, "input", may_lack=True)]
    user = {"role": "user", "content": "\n\n".join(text for text in asked if text)}
    return _chat(data, [user, {"role": "assistant", "content": _string(data, "output")}])


def _completion(data: Mapping[str, Any]) -> dict[str, Any]:
    """Raw text whose second half is learned; or the same as lists of messages."""
    prompt, completion = data["prompt"], data["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat(data, prompt + completion)
    return {"text": _string(data, "prompt"), "completion": _string(data, "completion", empty=False)}


def _completion_chat(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same two strings as a user turn and its answer."""
    asked, answer = _string(data, "prompt"), _string(data, "completion")
    return _chat(data, [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}])


def _plain_text(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"text": _string(data, "text", empty=False)}


def _string(data: Mapping[str, Any], key: str, *, may_lack: bool = False, empty: bool = True) -> str:
    value = data.get(key)
    if value is None and may_lack:
        return ""
    if not isinstance(value, str) or not (value or empty):
        raise Malformed(f"{key} is {'not a string' if empty else 'empty or not a string'}")
    return value


def _tokens(data: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids with a mask of 0 and 1 (or false and true), taken as they are."""
    ids, mask = data["input_ids"], data.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise Malformed("input_ids is not a list of token ids")
    if not isinstance(mask, list) or not all(type(m) in (int, bool) and m in (0, 1) for m in mask):
        raise Malformed("loss_mask is not a list of 0 and 1 beside its input_ids")
    if len(mask) != len(ids):
        raise Malformed(f"loss_mask has {len(mask)} entries for {len(ids)} input_ids")
    if not any(mask):
        raise Malformed("its loss_mask is 0 everywhere, so nothing to learn")
    return {"input_ids": tuple(ids), "loss_mask": tuple(map(bool, mask))}


@dataclass(frozen=True, slots=True)
class Form:
    """Keys a record must have, and how it is read. `found` is False for a form that is only ever asked for."""

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    found: bool = True


FORMS = {
    "messages": Form(("messages",), _messages_form),
    "sharegpt": Form(("conversations",), _sharegpt),
    "tokens": Form(("input_ids",), _tokens),
    "completion": Form(("prompt", "completion"), _completion),
    "completion-chat": Form(("prompt", "completion"), _completion_chat, found=False),
    "instruction": Form(("instruction", "output"), _instruction),
    "text": Form(("text",), _plain_text),
}
