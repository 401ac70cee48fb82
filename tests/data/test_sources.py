"""Every container gives the same records, the form is found for each file, and chunks depend on content alone."""

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from chats import chat
from draftsmith.data import sources
from draftsmith.data.conversations import Conversation, Reject, find_sources, read_conversations
from draftsmith.data.sources import open_source, read_chunks
from draftsmith.errors import ConfigError, InputError

ROWS: list[dict[str, Any]] = [{"messages": chat(f"u:question {i} ✓", f"a:answer {i}\n")} for i in range(1300)]


def written(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """The rows in the container that the name asks for."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    kind = path.name.split(".", 1)[1]
    if kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    elif kind == "feather":
        pa.feather.write_feather(pa.Table.from_pylist(rows), str(path), chunksize=300)
    elif kind == "arrow":  # a stream, as `datasets` writes
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    elif kind == "json":
        path.write_text("[" + ",\n".join(lines) + "]", encoding="utf-8")
    elif kind == "pretty.json":
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    elif kind == "spread.json":
        path.write_text("\n".join(json.dumps(row, indent=2) for row in rows), encoding="utf-8")
    elif kind.endswith("gz"):
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    else:
        path.write_text("\n".join(lines), encoding="utf-8")
    return path


CONTAINERS = ["a.jsonl", "a.jsonl.gz", "a.json", "a.pretty.json", "a.spread.json", "a.lines.json", "a.parquet",
              "a.feather", "a.arrow"]  # fmt: skip


@pytest.mark.parametrize("block_bytes", [2**20, 7])
@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_same_records(
    name: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
    rows = ROWS if block_bytes > 7 else ROWS[:30]
    items = list(read_conversations([str(written(tmp_path / name, rows))]))
    assert [item.messages for item in items if isinstance(item, Conversation)] == [tuple(r["messages"]) for r in rows]
    lines = [item.line for item in items]
    assert lines == sorted(set(lines))


def test_a_value_that_spans_lines_has_the_line_it_begins_in(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\ufeff\n[\n  {"text":\n "one"},\n\n {"text": "two"}\n ,{"text": 3},\n]\nmore', encoding="utf-8")
    items = list(read_conversations([str(path)]))
    assert [(item.line, getattr(item, "text", None)) for item in items] == [
        (3, "one"), (6, "two"), (7, None), (8, None), (9, None)
    ]  # fmt: skip
    assert [item.reason for item in items if isinstance(item, Reject)] == [
        "text is empty or not a string",
        "not JSON: Expecting value at column 1",
        "not JSON: Expecting value at column 1",
    ]


@pytest.mark.parametrize(
    ("text", "records"),
    [
        ("[]", 0),
        ("", 0),
        ("[{}]", 1),
        ('[{"text": "a, ] [ \\" }"}, {"text": "b"}]', 2),
        ('[{"text": "a"}, {"text": "b"', 2),
        ('[{"text": "a"}, {"text": "b}, {"text": "c"}]', 2),  # what a broken string swallows is in its reject
        ('[{"text": "a"},, {"text": "b"}]', 3),
        ("[1, [2, 3], 4]", 3),
        ('{\n"text": "a"\n}\n{\n"text": "b"\n}', 2),
    ],
)
def test_values_are_cut_apart_and_none_vanishes(text: str, records: int, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert len(list(read_conversations([str(path)]))) == records


def test_nulls_that_only_fill_a_table_are_left_out(tmp_path: Path) -> None:
    """Parquet gives every struct the fields that any of them has."""
    call = {"function": {"name": "f", "arguments": {"city": "Paris"}}}
    other = {"function": {"name": "g", "arguments": {"size": 3}}}
    turns = [*chat("u:x"), {"role": "assistant", "content": None, "tool_calls": [call, other]}]
    (item,) = read_conversations([str(written(tmp_path / "a.parquet", [{"messages": turns}]))])
    assert isinstance(item, Conversation)
    assert item.messages == (*chat("u:x"), {"role": "assistant", "content": "", "tool_calls": [call, other]})


FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": chat("u:x", "a:y")},
    "sharegpt": {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    "instruction": {"instruction": "x", "input": "", "output": "y"},
    "completion": {"prompt": "x", "completion": "y"},
    "text": {"text": "x"},
    "tokens": {"input_ids": [1, 2], "loss_mask": [0, 1]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_form_is_found_for_each_file(form: str, name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, [FORMS[form]])
    source = open_source("shown", path)
    assert source.form == form
    where = "lines (the keys in line 1)" if name == "a.jsonl" else "parquet (the keys in row 1)"
    assert str(source.decision) == f"form of shown: {form} in {where}"
    (item,) = read_conversations([str(path)])
    assert isinstance(item, Conversation)


def test_a_row_that_is_not_utf8_is_refused_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"  # not compressed: the text stands in the file as it is
    pa.parquet.write_table(pa.Table.from_pylist(ROWS[:5]), path, compression="none")
    path.write_bytes(path.read_bytes().replace(b"question 3", b"question\xff3"))
    items = list(read_conversations([str(path)]))
    assert [type(item) for item in items] == [*[Conversation] * 3, Reject, Conversation]
    assert items[3].line == 4
    assert "not UTF-8" in str(items[3])


@pytest.mark.parametrize("name", ["a.arrow", "a.feather"])
def test_damage_inside_a_table_is_refused_and_not_followed(name: str, tmp_path: Path) -> None:
    """Offsets that lead out of the file would end the process."""
    path, texts = tmp_path / name, ["first", "second"]
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    whole, offsets = path.read_bytes(), struct.pack("<3i", 0, 5, 11)
    assert whole.count(offsets) == 1
    for damage in (struct.pack("<3i", 0, 2**30, 2**31 - 1), struct.pack("<3i", 0, 11, 5)):
        path.write_bytes(whole.replace(offsets, damage))
        with pytest.raises(InputError, match=r"cannot be read: .*ffset"):
            list(read_conversations([str(path)]))
    path.write_bytes(whole.replace(b"second", b"s\xffcond"))
    with pytest.raises(InputError, match=r"cannot be read: .*UTF8"):
        list(read_conversations([str(path)]))


def test_a_form_can_be_asked_for(tmp_path: Path) -> None:
    both = {"text": "z", "prompt": "x", "completion": "y"}
    path = str(written(tmp_path / "a.jsonl", [both, {"text": "only"}]))
    found, text = read_conversations([path])
    assert isinstance(found, Conversation)
    assert (found.text, found.completion) == ("x", "y")
    assert isinstance(text, Conversation), "a record without the file's keys is read by those it has"
    chatty, strict = read_conversations([path], "completion-chat")
    assert isinstance(chatty, Conversation)
    assert chatty.messages == tuple(chat("u:x", "a:y"))
    assert isinstance(strict, Reject)
    assert strict.reason == "none of prompt, completion among its keys ['text']"
    with pytest.raises(ConfigError, match=r"data\.form is 'chatml'; known forms are messages, sharegpt, "):
        find_sources([path], "chatml")


def test_form_is_found_behind_broken_records(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{broken\n[1]\n{"other": 1}\n{"text": "x"}\n')
    assert open_source("a", path).reason == "the keys in line 4"
    path.write_text("{broken\n")
    assert open_source("a", path).reason == "no known form among its first 100 records"


def test_sharegpt_calls_become_tool_calls(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "x"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"}, {"from": "gpt", "value": "y"},
    ]  # fmt: skip
    tools = json.dumps([{"name": "f"}])
    (item,) = read_conversations([str(written(tmp_path / "a.jsonl", [{"conversations": turns, "tools": tools}]))])
    assert isinstance(item, Conversation)
    assert [m["role"] for m in item.messages] == ["user", "assistant", "tool", "assistant"]
    assert item.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert item.tools == ({"name": "f"},)
    turns[1]["value"] = "f(1)"
    (item,) = read_conversations([str(written(tmp_path / "a.jsonl", [{"conversations": turns}]))])
    assert isinstance(item, Reject)
    assert item.reason == "turn 1 (function_call) is not a JSON object with name and arguments"


def test_chunks_end_where_content_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 100)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 3000)
    path = written(tmp_path / "a.jsonl")
    chunks = list(read_chunks(open_source("a", path)))
    assert sum(len(chunk.records) for chunk in chunks) == len(ROWS)
    assert all(sum(len(raw) for _, raw in chunk.records[:-1]) < 3000 for chunk in chunks)
    assert [chunk.records for chunk in read_chunks(open_source("a", path))] == [chunk.records for chunk in chunks]
    assert chunks[-1].read_bytes == path.stat().st_size


def test_a_record_too_long_is_refused_and_the_next_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.data import forms

    for module in (sources, forms):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "' + "b" * 5000 + '"}\n{"text": "c"}\n')
    first, long, last = read_conversations([str(path)])
    assert isinstance(first, Conversation)
    assert isinstance(long, Reject)
    assert long.reason.startswith("longer than")
    assert isinstance(last, Conversation)
    assert (last.text, last.line) == ("c", 3)


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
def test_a_damaged_table_is_named(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=rf"data\.train: {path} cannot be read: "):
        list(read_conversations([str(path)]))
