"""Prepared folders: the same bytes however they came about, the same rows as the files they were made from."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chats import CHATML, LLAMA3, THINKING, chat, tokenizer
from draftsmith.data import sources
from draftsmith.data.conversations import find_sources
from draftsmith.data.corpus import Corpus, build_corpus
from draftsmith.data.crew import Crew, Work, processes_for
from draftsmith.data.prepare import Prepared, Preparer, Progress, count_duplicates
from draftsmith.data.settings import TemplateSettings
from draftsmith.data.shards import Shard
from draftsmith.data.sources import read_chunks
from draftsmith.data.template import Renderer
from draftsmith.errors import ConfigError, InputError

MASK = 264


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 20)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tokenizer(THINKING))


def lines(count: int, first: int = 0) -> list[str]:
    """Chats of one and two answers, some with thinking, every seventh broken, every tenth a copy."""
    made = []
    for i in range(first, first + count):
        number = i - 1 if i % 10 == 9 else i
        turns = [f"u:question {number}", f"a:<think>\nhm\n</think>\n\nanswer {number}"]
        record = {"messages": chat(*turns, *(["u:more?", "a:no"] if number % 3 else []))}
        made.append("{broken" if i % 7 == 6 else json.dumps(record))
    return made


def write(path: Path, made: list[str]) -> str:
    path.write_text("\n".join(made))
    return str(path)


def prepare(
    files: list[str], out: Path, renderer: Renderer, processes: int = 1, stop_at: int = 10**9
) -> Prepared | None:
    """Stops after some chunks, as a kill would between two of them."""
    stop, seen = threading.Event(), []

    def progress(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == stop_at:
            stop.set()

    return Preparer(find_sources(files), Work(renderer), out, processes).run(stop, progress)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def corpus(names: list[str], renderer: Renderer, row_tokens: int = 10_000, **more: Any) -> Corpus:
    return build_corpus(names, renderer, mask_token=MASK, row_tokens=row_tokens, hold_out_prompts=True, **more)


def test_counts_add_up_and_the_summary_is_true(tmp_path: Path, renderer: Renderer) -> None:
    made = prepare([write(tmp_path / "a.jsonl", lines(140))], tmp_path / "out", renderer)
    assert made is not None
    assert (made.kept, made.rejected, made.shards, made.reused) == (120, 20, 7, 0)
    shards = [Shard(path) for path in sorted((tmp_path / "out" / "shards").iterdir())]
    documents = [d for s in shards for item in s.items() if not hasattr(item, "reason") for d in item.documents]
    assert made.documents == len(documents) > made.kept, "thinking makes two documents of two answers"
    assert made.tokens == sum(len(d.tokens_T) for d in documents)
    assert made.supervised == sum(int(d.supervised_T.sum()) for d in documents)
    kept = [line for line in lines(140) if line != "{broken"]
    assert made.duplicates == len(kept) - len(set(kept)) > 0
    assert sum(made.lengths.values()) == made.documents
    assert all(int(length) // 2 < max(len(d.tokens_T) for d in documents) <= 128 for length in list(made.lengths)[-1:])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["summary"]["kept"] == 120
    assert len((tmp_path / "out" / "rejects.jsonl").read_text().splitlines()) == 20


@pytest.mark.parametrize("processes", [1, 2])
def test_stopped_and_resumed_is_byte_for_byte_the_same(processes: int, tmp_path: Path, renderer: Renderer) -> None:
    files = [write(tmp_path / "a.jsonl", lines(140)), write(tmp_path / "b.jsonl", lines(50, 500))]
    whole = prepare(files, tmp_path / "whole", renderer)
    assert whole is not None
    assert prepare(files, tmp_path / "parts", renderer, processes, stop_at=4) is None
    assert not (tmp_path / "parts" / "manifest.json").exists()
    (tmp_path / "parts" / "shards" / ".000009-x.arrow.new").mkdir()
    (tmp_path / "parts" / "shards" / ".000009-x.arrow.new" / "000009-x.arrow").write_bytes(b"half")
    resumed = prepare(files, tmp_path / "parts", renderer, processes)
    assert resumed is not None
    assert 0 < resumed.reused < resumed.shards
    assert replace(resumed, reused=0) == whole
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    again = prepare(files, tmp_path / "parts", renderer, processes)
    assert again is not None
    assert again.reused == again.shards == whole.shards
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_what_changed_in_a_file_is_made_again_and_nothing_else(tmp_path: Path, renderer: Renderer) -> None:
    made = lines(140)
    path = write(tmp_path / "a.jsonl", made)
    prepare([path], tmp_path / "out", renderer)
    made[45] = made[45].replace("question", "quantity")  # as long as before
    write(tmp_path / "a.jsonl", [*made, *lines(5, 900)])
    changed = prepare([path], tmp_path / "out", renderer)
    fresh = prepare([path], tmp_path / "fresh", renderer)
    assert changed is not None
    assert (changed.shards, changed.reused) == (8, 6)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")
    assert fresh is not None


def test_a_folder_is_not_mixed_with_another_preparation(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "a.jsonl", lines(40))
    prepare([path], tmp_path / "out", renderer)
    with pytest.raises(ConfigError, match=r"out holds data prepared with other rendering_key; choose"):
        prepare([path], tmp_path / "out", Renderer(tokenizer(LLAMA3)))
    with pytest.raises(ConfigError, match="with other files; choose another folder"):
        prepare([path, path], tmp_path / "out", renderer)
    with pytest.raises(ConfigError, match="is not empty and no prepared data"):
        prepare([path], tmp_path, renderer)


def test_two_at_once_are_refused(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "a.jsonl", lines(40))
    heard: list[str] = []

    def again(progress: Progress) -> None:
        try:
            prepare([path], tmp_path / "out", renderer)
        except ConfigError as error:
            heard.append(str(error))

    Preparer(find_sources([path]), Work(renderer), tmp_path / "out", 1).run(threading.Event(), again)
    assert "is in use by another draftsmith process" in heard[0]


def test_everything_that_matters_is_in_the_key() -> None:
    base = tokenizer(CHATML)
    keys = {"base": Renderer(base).key, "template": Renderer(tokenizer(CHATML + " ")).key}
    more = tokenizer(CHATML)
    more.add_tokens(["new"])
    keys["vocabulary"] = Renderer(more).key
    other = tokenizer(CHATML)
    other.eos_token = "<|im_end|>"
    keys["special tokens"] = Renderer(other).key
    from datetime import date

    keys["date"] = Renderer(tokenizer(CHATML), TemplateSettings(today=date(2020, 1, 1))).key
    switch = CHATML + "{{ '' if enable_thinking else '' }}"
    keys["switch"] = Renderer(tokenizer(switch)).key
    keys["thinking"] = Renderer(tokenizer(switch), TemplateSettings(thinking=True)).key
    keys["argument"] = Renderer(tokenizer(switch), TemplateSettings(arguments={"enable_thinking": True})).key
    assert len(set(keys.values())) == len(keys)
    assert Renderer(tokenizer(CHATML)).key == keys["base"]


@pytest.mark.parametrize("row_tokens", [10_000, 45])
def test_training_on_a_folder_is_training_on_the_files(row_tokens: int, tmp_path: Path, renderer: Renderer) -> None:
    """Documents, held-out prompts, rejects and their order are the same; only the prompts come as ids."""
    reserved = json.dumps({"messages": chat("u:<|reserved_special_token_0|>", "a:y")})
    text = [json.dumps({"text": "plain words"}), json.dumps({"prompt": "one", "completion": " two"})]
    a = write(
        tmp_path / "a.jsonl", [*lines(140), reserved, *text, json.dumps({"input_ids": [65, 66], "loss_mask": [1, 1]})]
    )
    b = write(tmp_path / "b.jsonl", lines(60, 500))
    prepare([a], tmp_path / "out", renderer)
    raw, made = (corpus([name, b], renderer, row_tokens) for name in (a, str(tmp_path / "out")))
    assert made.summary == raw.summary
    assert made.fingerprint == raw.fingerprint
    assert made.rejects == raw.rejects
    assert any("mask token" in reject.reason for reject in made.rejects)
    assert len(made.held_out) == len(raw.held_out) > 0
    ids = [[renderer.prompt_ids(prompt) for prompt in c.held_out] for c in (made, raw)]
    assert ids[0] == ids[1]
    for ours, theirs in zip(made.documents, raw.documents, strict=True):
        np.testing.assert_array_equal(ours.tokens_T, theirs.tokens_T)
        np.testing.assert_array_equal(ours.supervised_T, theirs.supervised_T)


def test_a_folder_for_another_template_or_a_damaged_one_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    prepare([write(tmp_path / "a.jsonl", lines(40))], tmp_path / "out", renderer)
    with pytest.raises(InputError, match="was prepared with another tokenizer, chat template or template settings"):
        corpus([str(tmp_path / "out")], Renderer(tokenizer(LLAMA3)))
    shard = next((tmp_path / "out" / "shards").iterdir())
    good = shard.read_bytes()
    shard.write_bytes(good[:-100] + b"x" + good[-99:])
    with pytest.raises(InputError, match=rf"{shard.name} is missing or damaged; run `draftsmith data prepare` again"):
        corpus([str(tmp_path / "out")], renderer)
    (tmp_path / "out" / "manifest.json").write_text('{"format": "draftsmith data 0"}')
    with pytest.raises(InputError, match="its format is 'draftsmith data 0'"):
        corpus([str(tmp_path / "out")], renderer)


def test_duplicates_are_counted_in_passes_as_in_one(tmp_path: Path, renderer: Renderer) -> None:
    made = prepare([write(tmp_path / "a.jsonl", lines(140))], tmp_path / "out", renderer)
    assert made is not None
    paths = sorted((tmp_path / "out" / "shards").iterdir())
    assert count_duplicates(paths, at_once=7) == count_duplicates(paths) == made.duplicates


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_to_the_group_leaves_workers_alone(number: int, tmp_path: Path, renderer: Renderer) -> None:
    """Also while they start: then a parent that waits for a dead child would wait for ever."""
    path = write(tmp_path / "a.jsonl", lines(200))
    crew = Crew(Work(renderer), 2)
    try:
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, number)
        for place, chunk in enumerate(read_chunks(find_sources([path])[0])):
            list(crew.make(place, chunk, tmp_path / f"{place}.arrow"))
        list(crew.finish())
    finally:
        crew.close()
    assert len(list(tmp_path.glob("*.arrow"))) == 10


@pytest.mark.slow
def test_a_worker_that_dies_while_it_starts_blocks_nobody(tmp_path: Path, renderer: Renderer) -> None:
    def kill_first() -> None:
        while not multiprocessing.active_children():
            time.sleep(0.001)
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    killer = threading.Thread(target=kill_first)
    killer.start()
    path = write(tmp_path / "a.jsonl", lines(200))
    with pytest.raises(InputError, match="a worker process died"):
        prepare([path], tmp_path / "out", renderer, 2)
    killer.join()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_worker_that_dies_is_reported_and_what_is_done_is_kept(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "a.jsonl", lines(200))

    def kill(progress: Progress) -> None:
        if progress.kept:
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    with pytest.raises(InputError, match="a worker process died"):
        Preparer(find_sources([path]), Work(renderer), tmp_path / "out", 2).run(threading.Event(), kill)
    assert not multiprocessing.active_children()
    resumed = prepare([path], tmp_path / "out", renderer)
    assert resumed is not None
    assert resumed.reused > 0


def test_small_data_needs_no_other_processes() -> None:
    assert processes_for(10**6, 8) == 1
    assert processes_for(10**9, 8) == 8


COMMAND = """
import sys
from draftsmith.data import sources
from draftsmith.cli import main
if __name__ == "__main__":
    sources.CHUNK_RECORDS = 50
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_killed_and_resumed_by_command(tmp_path: Path) -> None:
    """kill -9 leaves no worker behind and the next run ends with the same bytes."""
    path = write(tmp_path / "a.jsonl", [json.dumps({"messages": chat(f"u:hi {i}", "a:ho")}) for i in range(4000)])
    script = tmp_path / "run.py"
    script.write_text(COMMAND)

    def begin(out: str) -> "subprocess.Popen[str]":
        where = [str(tmp_path / "a.jsonl"), "--target", "demo", "--out", str(tmp_path / out), "--processes", "2"]
        command = [sys.executable, str(script), "data", "prepare", *where]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    killed = begin("parts")
    shards = tmp_path / "parts" / "shards"
    while not (shards.is_dir() and len(list(shards.glob("*.arrow"))) > 10):
        assert killed.poll() is None
        time.sleep(0.005)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    deadline = time.monotonic() + 20
    while _alive_in_session(killed.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive_in_session(killed.pid)
    assert not (tmp_path / "parts" / "manifest.json").exists()
    for out in ("parts", "whole"):
        run = begin(out)
        said, _ = run.communicate(timeout=120)
        assert run.returncode == 0
        assert said.splitlines()[-1] == "4000 conversations kept, 0 rejected"
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert path


def _alive_in_session(leader: int) -> bool:
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            return True
    return False


def test_a_damaged_shard_is_made_again_and_never_blessed(tmp_path: Path, renderer: Renderer) -> None:
    files = [write(tmp_path / "a.jsonl", lines(40))]
    prepare(files, tmp_path / "out", renderer)
    good = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    shard = next((tmp_path / "out" / "shards").iterdir())
    whole = shard.read_bytes()
    for bad in (b"", whole[:100], whole[:-100] + b"x" + whole[-99:]):
        shard.write_bytes(bad)
        made = prepare(files, tmp_path / "out", renderer)
        assert made is not None
        assert made.reused == made.shards - 1
        assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == good


def test_a_kill_while_a_preparation_begins_leaves_no_dead_end(tmp_path: Path, renderer: Renderer) -> None:
    """It may leave what it was writing; the file itself is there whole or not at all."""
    out = tmp_path / "out"
    out.mkdir()
    (out / ".preparing.json.new").mkdir()
    (out / ".preparing.json.new" / "preparing.json").write_text('{"form')
    made = prepare([write(tmp_path / "a.jsonl", lines(20))], out, renderer)
    assert made is not None
    assert made.kept
    assert not list(out.glob(".*.new"))


@pytest.mark.parametrize("name", ["preparing.json", "manifest.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"format": "draftsmith data 1", "shards": [3]}'])
def test_a_damaged_note_of_a_folder_is_named(name: str, content: bytes, tmp_path: Path, renderer: Renderer) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(content)
    with pytest.raises(InputError, match=f"out/{name} cannot be used|prepared with other"):
        prepare([write(tmp_path / "a.jsonl", lines(20))], tmp_path / "out", renderer)
