"""Every line becomes a conversation or a reject with its place; prompt files are refused by line."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from chats import chat
from draftsmith.data.conversations import (
    Conversation,
    Prompt,
    Reject,
    as_prompt,
    hold_out,
    read_conversations,
    read_prompts,
)
from draftsmith.errors import InputError

GOOD = {"messages": chat("u:hi", "a:hello")}


def write(path: Path, *lines: Any) -> str:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return str(path)


def test_every_line_is_a_conversation_or_a_reject_with_its_place(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", GOOD, b"", b"{broken", {"text": "plain"}, [1])
    b = write(tmp_path / "b.jsonl", {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]})
    items = list(read_conversations([a, b]))
    assert [(Path(i.file).name, i.line, isinstance(i, Reject)) for i in items] == [
        ("a.jsonl", 1, False), ("a.jsonl", 3, True), ("a.jsonl", 4, False), ("a.jsonl", 5, True), ("b.jsonl", 1, False),
    ]  # fmt: skip
    assert isinstance(items[4], Conversation)
    assert items[4].messages == tuple(chat("u:x", "a:y"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{broken", "not JSON"),
        (b"1" * 5000, "not usable JSON"),
        (b"[" * 100_000, "not usable JSON"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
        (b'{"text": "a\\ud800b"}', "surrogate"),
        (b"7", "a int instead of an object"),
        (
            {"other": 1},
            "none of conversations, input_ids, instruction, messages, prompt, text among its keys ['other']",
        ),
        ({"text": ""}, "text is empty"),
        ({"messages": []}, "at least one turn"),
        ({"messages": "hi"}, "at least one turn"),
        ({"messages": [{"content": "x"}]}, "turn 0 has no role"),
        ({"messages": [*chat("u:x"), {"role": "bot", "content": "y"}]}, "turn 1 has the unknown role 'bot'"),
        ({"messages": [*chat("u:x"), {"role": "assistant", "content": None}]}, "turn 1 (assistant) has no text"),
        ({"messages": chat("u:x")}, "no assistant turn"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "unknown role 'narrator'"),
        ({"conversations": [{"value": "x"}]}, "turn 0 has no role"),
        ({"conversations": 3}, "at least one turn"),
        ({"system": "be rude", "messages": chat("s:be kind", "u:x", "a:y")}, "it has two system prompts"),
        (GOOD | {"system": ["be rude"]}, "its key system is not a string"),
        (GOOD | {"functions": [{"name": "f"}]}, "its key functions would be lost"),
        (GOOD | {"tools": "[{"}, "its tools are a string that is not JSON"),
        (GOOD | {"tools": [1]}, "its tools are not a list of objects"),
    ],
)
def test_a_bad_line_is_a_reject_that_says_why(line: Any, reason: str, tmp_path: Path) -> None:
    (item,) = read_conversations([write(tmp_path / "a.jsonl", line)])
    assert isinstance(item, Reject)
    assert reason in item.reason
    assert json.loads(item.to_json()) == {"file": item.file, "line": 1, "reason": item.reason}
    item.to_json().encode()


def test_a_byte_order_mark_and_windows_line_ends_are_no_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r", json.dumps(GOOD).encode())
    assert [type(item) for item in read_conversations([path])] == [Conversation, Conversation]


def test_tool_and_system_turns_stay(tmp_path: Path) -> None:
    messages = chat("s:be kind", "u:x", "a:call", "t:result", "a:done")
    (item,) = read_conversations([write(tmp_path / "a.jsonl", {"messages": messages})])
    assert isinstance(item, Conversation)
    assert item.messages == tuple(messages)


def test_gzip_is_unpacked_and_a_damaged_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b"".join(json.dumps({"text": random.Random(i).random()}).encode() for i in range(999)))
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert len(list(read_conversations([str(path)]))) == 1
    for damaged in (b"no gzip", whole[:-20], whole[:40] + b"\xff" * 40 + whole[80:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"data\.train: .*a\.jsonl\.gz cannot be read"):
            list(read_conversations([str(path)]))


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"data\.train: {tmp_path}/none\.jsonl cannot be read: No such file"):
        list(read_conversations([str(tmp_path / "none.jsonl")]))
    with pytest.raises(InputError, match=rf"data\.train: {tmp_path} holds no data file"):
        list(read_conversations([str(tmp_path)]))


def test_prompts_are_read_in_file_order(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"messages": chat("u:x"), "reference": "y"}, {"prompt": "raw"},
                 {"messages": chat("u:x", "a:call", "t:r")})  # fmt: skip
    prompts = read_prompts([path, path])
    assert prompts[:3] == prompts[3:]
    assert prompts[0] == Prompt(messages=tuple(chat("u:x")), reference="y")
    assert prompts[1] == Prompt(text="raw")
    assert prompts[2].source == f"{path}:3"
    again = write(tmp_path / "again.jsonl", *(json.loads(p.to_json()) for p in prompts[:3]))
    assert read_prompts([again]) == prompts[:3]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b'{"prompt": "\\udfff"}', "surrogate"),
        (b"[1]", "give either"),
        ({}, "give either"),
        ({"prompt": "x", "messages": chat("u:x")}, "give either"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": 3}, "prompt is empty"),
        ({"messages": chat("u:x", "a:y")}, "must end in a user or tool turn"),
        ({"messages": []}, "at least one turn"),
        ({"messages": chat("u:x"), "reference": 5}, "reference is not a string"),
    ],
)
def test_a_bad_prompt_is_refused_by_file_and_line(line: Any, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "good"}, line)
    with pytest.raises(InputError, match=rf"p\.jsonl:2: .*{reason}"):
        read_prompts([path])


def test_each_prompt_file_must_hold_one(tmp_path: Path) -> None:
    full, empty = write(tmp_path / "p.jsonl", {"prompt": "x"}), write(tmp_path / "empty.jsonl", b"")
    with pytest.raises(InputError, match=r"empty\.jsonl holds no prompt"):
        read_prompts([full, empty])


def chats(count: int) -> list[tuple[str, bool]]:
    made = [Conversation("f", i, tuple(chat(f"u:question {i}", "a:answer"))) for i in range(count)]
    return [(conversation.content_hash, True) for conversation in made]


def test_held_out_are_the_smallest_hashes_whatever_else_is_there() -> None:
    all_of_them = chats(200)
    held = hold_out(all_of_them, 0.05, 64)
    assert held == set(sorted(content for content, _ in all_of_them)[:10])
    shuffled = random.Random(0).sample(all_of_them, 200)
    assert hold_out(shuffled, 0.05, 64) == held
    assert hold_out(all_of_them, 0.05, 3) < held
    assert hold_out(all_of_them[:19], 0.05, 64) == frozenset()
    assert len(hold_out(all_of_them[:199], 0.05, 64) - held) <= 1
    here, there = (Conversation(file, line, tuple(chat("u:x", "a:y"))) for file, line in (("f", 1), ("elsewhere", 9)))
    assert here.content_hash == there.content_hash


def test_only_what_can_be_asked_is_held_out() -> None:
    assert hold_out([(content, False) for content, _ in chats(100)], 0.5, 64) == frozenset()


def test_a_held_out_chat_asks_for_its_last_answer() -> None:
    asked = as_prompt(Conversation("f", 7, tuple(chat("s:k", "u:a", "a:b", "u:c", "a:d", "u:e"))))
    assert asked == Prompt(messages=tuple(chat("s:k", "u:a", "a:b", "u:c")), reference="d")
    assert asked is not None
    assert asked.source == "f:7"
    assert as_prompt(Conversation("f", 1, tuple(chat("a:hello")))) is None
