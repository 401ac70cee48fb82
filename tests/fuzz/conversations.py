"""Conversations: records of every form, changed inside, in every container, damaged outside."""

import gzip
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chats import shipped, tokenizer
from draftsmith import embedded
from draftsmith.data.conversations import Prompt, Reject, read_conversations, read_prompts
from draftsmith.data.corpus import build_corpus
from draftsmith.data.forms import FORMS
from draftsmith.data.regenerate.tasks import read_tasks
from draftsmith.data.template import Renderer
from draftsmith.errors import InputError, NothingToTrainOnError
from fuzz.fuzzing import changed, damaged, junk, one_line

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A b"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
VALID: list[Any] = [
    {"messages": TURNS},
    {"messages": [*TURNS, {"role": "user", "content": [{"type": "text", "text": "again"}]}, TURNS[-1]]},
    {"messages": [TURNS[1], {"role": "assistant", "content": None, "tool_calls": [CALL]},
                  {"role": "tool", "content": "7"}, TURNS[2]], "tools": TOOLS},
    {"messages": [TURNS[1], {**TURNS[2], "reasoning_content": "so"}]},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "system": "s"},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "function_call", "value": '{"name": "f"}'}]},
    {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]},
    {"prompt": "Q", "completion": " A"},
    {"prompt": [TURNS[1]], "completion": [TURNS[2]]},
    {"instruction": "I", "input": "x", "output": "A", "history": []},
    {"text": "some plain text"},
]  # fmt: skip
CONTAINERS = ("lines", "values", "gz", "parquet", "arrow", "damaged", "damaged gz", "damaged parquet", "damaged arrow")
TEMPLATES = ("demo", "qwen3", "gpt-oss", "deepseek-v3.1", "mistral-nemo")
SUFFIX = {"gz": ".jsonl.gz", "parquet": ".parquet", "arrow": ".arrow"}


@dataclass(frozen=True)
class Example:
    """A file; how many records it holds, if that can be told without reading it as we do; and how it is read."""

    suffix: str
    data: bytes
    records: int | None
    form: str | None
    hold_out: bool
    template: str


@st.composite
def examples(draw: st.DrawFn) -> Example:
    made = st.one_of(st.sampled_from(VALID), st.sampled_from(VALID).flatmap(changed), junk)
    records = draw(st.lists(made, min_size=1, max_size=4))
    container = draw(st.sampled_from(CONTAINERS))
    kind = container.removeprefix("damaged").strip()
    lines = [
        json.dumps(record, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass") for record in records
    ]
    data, count = _file(kind, records, lines)
    if container.startswith("damaged"):
        data, count = draw(damaged(data)), None
    form = draw(st.sampled_from([None, None, None, *FORMS]))
    return Example(SUFFIX.get(kind, ".jsonl"), data, count, form, draw(st.booleans()), draw(st.sampled_from(TEMPLATES)))


def _file(kind: str, records: list[Any], lines: list[bytes]) -> tuple[bytes, int | None]:
    if kind == "values":
        return b"[" + b",\n".join(lines) + b"]", len(lines) if len(lines) > 1 else None
    if kind in ("parquet", "arrow"):
        try:
            table = pa.Table.from_pylist([r if isinstance(r, dict) else {"text": str(r)} for r in records])
            out = io.BytesIO()
            if kind == "parquet":
                pa.parquet.write_table(table, out)
            else:
                with pa.ipc.new_file(out, table.schema) as writer:
                    writer.write_table(table)
            return out.getvalue(), table.num_rows
        except (pa.ArrowException, ValueError, TypeError, OverflowError, UnicodeError, RecursionError):
            return b"PAR1", None  # not every value has a place in a table
    # A file whose first line is an array or half an object is read as values: then no line is a record.
    plain = lines[0][:1] not in b"[{" or lines[0][:1] == b"{"
    text = b"\n".join(lines) + b"\n"
    return (gzip.compress(text, 1) if kind == "gz" else text), len(lines) if plain else None


def checker(folder: Path) -> Callable[[Example], None]:
    renderers = {"demo": Renderer(AutoTokenizer.from_pretrained(embedded.TARGET))}
    renderers |= {name: Renderer(tokenizer(shipped(name))) for name in TEMPLATES[1:]}

    def check(example: Example) -> None:
        renderer = renderers[example.template]
        path = folder / f"c{example.suffix}"
        path.write_bytes(example.data)
        name = str(path)
        given = _given(name, example)
        _prompts(name, renderer)
        try:
            corpus = build_corpus(
                [name], renderer, mask_token=3, row_tokens=64, hold_out_prompts=example.hold_out,
                form=example.form,
            )  # fmt: skip
        except NothingToTrainOnError as error:
            _all_accounted_for(error, given)
        except InputError as error:
            one_line(error)
            assert given is None
        else:
            assert corpus.trained + corpus.held_out_lines + len(corpus.rejects) == corpus.read == given
            assert all(reject.reason.strip() for reject in corpus.rejects)
            assert corpus.summary
            _asked(renderer, corpus.held_out)

    return check


def _all_accounted_for(error: NothingToTrainOnError, given: int | None) -> None:
    one_line(error)
    assert given is not None
    reasons = [json.loads(line)["reason"] for line in error.rejects]
    assert all(reasons)
    assert f"{given} records read, {len(reasons)} rejected, {given - len(reasons)} held out" in str(error)


def _given(name: str, example: Example) -> int | None:
    """How many records a file has: the same for training and regeneration. None if it cannot be read."""
    try:
        read = list(read_conversations([name], example.form))
    except InputError as error:
        one_line(error)
        return None
    assert all(item.reason.strip() for item in read if isinstance(item, Reject))
    assert example.records in (None, len(read))
    assert len(list(read_tasks([name], example.form))) == len(read)
    return len(read)


def _prompts(name: str, renderer: Renderer) -> None:
    try:
        prompts = read_prompts([name])
    except InputError as error:
        one_line(error)
    else:
        _asked(renderer, prompts)


def _asked(renderer: Renderer, prompts: Iterable[Prompt]) -> None:
    for prompt in prompts:
        try:
            assert renderer.prompt_ids(prompt)
        except InputError as error:
            one_line(error)
