"""Kept features are the computed ones: same bits in memory, on disk, after a kill, read by others, and never stale."""

import re
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import run_training
from draftsmith import cli
from draftsmith.config import Config
from draftsmith.errors import ConfigError, InputError
from draftsmith.pipeline import keeping
from draftsmith.pipeline.machine import this_machine
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.store import DiskStore, MemoryStore, StoreIdentity
from draftsmith.target.load import Target
from faults import largest_file, no_handles, small_disk

MakeConfig = Callable[..., Config]
IDENTITY = StoreIdentity("target", (0, 1), "float32", "documents")


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Documents of every target call that is made for features."""
    calls: list[int] = []
    features = Target.features

    def counted(self: Target, documents: Any) -> list[torch.Tensor]:
        calls.append(len(documents))
        return features(self, documents)

    monkeypatch.setattr(Target, "features", counted)
    return calls


@pytest.fixture
def small(demo_config: MakeConfig, some_conversations: Path, tmp_path: Path) -> MakeConfig:
    """Two epochs of the first 16 conversations; the keyword `name` is the run's folder."""
    lines = some_conversations.read_text().splitlines(keepends=True)[:16]
    (tmp_path / "some.jsonl").write_text("".join(lines))

    def make(name: str, **changes: Any) -> Config:
        where = {"run__dir": str(tmp_path / name), "data__train": [str(tmp_path / "some.jsonl")]}
        size = {"train__steps": None, "train__epochs": 2, "train__rows_per_step": 2}
        drafter = {"drafter__layers": 1, "drafter__block_size": 4, "data__anchor_density": 0.1}
        return demo_config(**(where | size | drafter | changes))

    return make


def last_weights(config: Config) -> dict[str, torch.Tensor]:
    (found,) = Path(config.run.dir).glob("checkpoints/step-*")
    return load_file(found / "drafter.safetensors")


def same_bits(a: Config, b: Config) -> bool:
    one, other = last_weights(a), last_weights(b)
    return all(torch.equal(one[name], other[name]) for name in one)


def some_features(count: int = 6, seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(3 + number, 8, generator=random) for number in range(count)]


def open_store(folder: Path, said: list[str] | None = None, count: int = 6, **more: Any) -> DiskStore:
    say = (said if said is not None else []).append
    return DiskStore(folder, IDENTITY, count, torch.float32, torch.float32, say, **more)


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_two_epochs_equal_online_bit_for_bit_and_the_second_asks_no_target(
    small: MakeConfig, forwards: list[int], mode: str
) -> None:
    _, _, runs = run_training(small("online"))
    rows = runs[0].job.source.epoch_rows(0)
    assert len(forwards) == -(-2 * rows // 2) * 2  # every row of both epochs
    forwards.clear()
    run_training(small(mode, features=mode))
    assert len(forwards) == rows
    assert sum(forwards) == len(runs[0].job.corpus.documents)
    assert same_bits(small(mode), small("online"))


def test_bits_do_not_depend_on_who_fills_the_store(small: MakeConfig) -> None:
    run_training(small("online", pipeline__threads=1))
    run_training(small("kept", pipeline__threads=1, features="disk", topology="3+1"))
    assert same_bits(small("kept"), small("online"))


def test_runs_share_a_store_that_is_complete(small: MakeConfig, forwards: list[int], tmp_path: Path) -> None:
    shared = {"features": "disk", "store__dir": str(tmp_path / "shared")}
    run_training(small("first", **shared))
    forwards.clear()
    _, quiet, _ = run_training(small("second", seed=5, drafter__layers=2, **shared))
    assert not forwards
    assert any("all of them: the target computes none" in line for line in quiet.lines)
    assert not (tmp_path / "second" / "features").exists()


@pytest.mark.parametrize("dtype", ["target", "bfloat16"])
def test_stopped_and_resumed_it_ends_with_the_bits_of_a_whole_run(
    small: MakeConfig, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Stopped in the first epoch with a part of the documents in shards; the rest is computed after the resume."""
    monkeypatch.setattr(DiskStore.__init__, "__defaults__", (2**18,))  # shards of 256 KiB
    run_training(small("whole", features="memory", store__dtype=dtype))
    stop = threading.Event()
    cut = small("cut", features="disk", store__dtype=dtype)
    monkeypatch.setattr(DiskStore, "close", lambda self: self._release())  # a kill: nothing is written at the end
    run_training(cut, stop=_stop_after(2, stop, monkeypatch))
    kept = len(list((Path(cut.run.dir) / "features").glob("shard-*.safetensors")))
    assert kept > 0
    monkeypatch.undo()
    result, _, _ = run_training(cut, resume=True)
    assert result.finished
    for old in Path(cut.run.dir).glob("checkpoints/step-2"):
        shutil.rmtree(old)
    assert same_bits(cut, small("whole"))
    if dtype == "bfloat16":
        run_training(small("online"))
        assert not same_bits(cut, small("online"))


def _stop_after(step: int, stop: threading.Event, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    from draftsmith.pipeline.journal import Journal

    record = Journal.record

    def stopping(self: Journal, given: Any) -> None:
        record(self, given)
        if given.step == step - 1:
            stop.set()

    monkeypatch.setattr(Journal, "record", stopping)
    return stop


def test_a_damaged_shard_is_said_and_computed_again(small: MakeConfig, forwards: list[int], tmp_path: Path) -> None:
    shared = {"features": "disk", "store__dir": str(tmp_path / "shared")}
    run_training(small("first", **shared))
    (shard,) = (tmp_path / "shared").glob("shard-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1  # in the features of one document
    shard.write_bytes(data)
    forwards.clear()
    _, quiet, _ = run_training(small("second", **shared))
    assert forwards
    assert any("shard-000000.safetensors is damaged (document" in line for line in quiet.lines)
    assert same_bits(small("second"), small("first"))
    assert {p.name for p in (tmp_path / "shared").glob("shard-*")} == {
        "shard-000000.safetensors.damaged",
        "shard-000001.safetensors",
    }
    forwards.clear()
    run_training(small("third", **shared))
    assert not forwards


def test_a_cut_shard_and_a_leftover_do_not_stop_a_run(tmp_path: Path) -> None:
    hidden, said = some_features(), []
    first = open_store(tmp_path, shard_bytes=1)
    for number, features in enumerate(hidden):
        first.put([number], [features])
    first.close()
    shards = sorted(tmp_path.glob("shard-*"))
    assert len(shards) == 6
    shards[2].write_bytes(shards[2].read_bytes()[:-1])
    (tmp_path / ".shard-000009.safetensors.new").mkdir()  # of a killed process
    (tmp_path / ".shard-000009.safetensors.new" / ".tmpab").write_bytes(b"half")
    again = open_store(tmp_path, said)
    assert "5 of 6 documents" in again.summary
    assert not list(tmp_path.glob(".shard-*"))
    assert again.get([2]) is None
    assert again.get([1, 2]) is None
    assert len(said) == 1
    again.put([2], [hidden[2]])
    again.close()
    whole = open_store(tmp_path)
    assert "all of them" in whole.summary
    found = whole.get(range(6))
    assert found is not None
    assert all(torch.equal(a, b) for a, b in zip(found, hidden, strict=True))


def test_a_batch_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """A target call is repeated with the same documents, so that its bits stay what they were."""
    hidden = some_features()
    for kept in (MemoryStore(torch.float32, torch.float32), open_store(tmp_path)):
        kept.put([0, 1], hidden[:2])
        assert kept.get([0, 1, 2]) is None
        found = kept.get([1, 0])
        assert found is not None
        assert [len(h) for h in found] == [4, 3]
        hidden[0].zero_()  # what is kept is a copy
        assert float(found[1].abs().sum()) > 0
        hidden = some_features()


def test_the_first_copy_of_a_document_stays(tmp_path: Path) -> None:
    kept = open_store(tmp_path, shard_bytes=1)
    kept.put([0], some_features(1))
    kept.put([0], some_features(1, seed=1))
    kept.close()
    found = open_store(tmp_path).get([0])
    assert found is not None
    assert torch.equal(found[0], some_features(1)[0])
    assert len(list(tmp_path.glob("shard-*"))) == 1


def test_what_is_kept_rounded_is_trained_on_rounded_from_the_start(tmp_path: Path) -> None:
    for kept in (
        MemoryStore(torch.bfloat16, torch.float32),
        DiskStore(tmp_path, IDENTITY, 6, torch.bfloat16, torch.float32, print, 1),
    ):
        given = kept.put([0], some_features(1))
        found = kept.get([0])
        assert found is not None
        assert given[0].dtype == found[0].dtype == torch.float32
        assert torch.equal(given[0], found[0])
        assert not torch.equal(given[0], some_features(1)[0])


READER = """
import sys
from pathlib import Path
import torch
from draftsmith.pipeline.store import DiskStore, StoreIdentity
folder, count = Path(sys.argv[1]), int(sys.argv[2])
identity = StoreIdentity("target", (0, 1), "float32", "documents")
store = DiskStore(folder, identity, count, torch.float32, torch.float32, print)
print(store.summary)
print(sum(float(h.double().sum()) for h in store.get(range(6))))
store.put([6], [torch.ones(2, 8)])
store.close()
"""


def test_processes_read_while_another_writes(tmp_path: Path) -> None:
    writer = open_store(tmp_path, count=7, shard_bytes=1)
    writer.put(range(6), some_features())
    before = {p: p.read_bytes() for p in tmp_path.glob("s*")}
    arguments = [sys.executable, "-c", READER, str(tmp_path), "7"]
    readers = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for reader in readers:
        out, _ = reader.communicate(timeout=60)
        assert reader.returncode == 0
        summary, total = out.splitlines()
        assert "6 of 7 documents" in summary
        assert "this one only reads" in summary
        assert float(total) == sum(float(h.double().sum()) for h in some_features())
    assert {p: p.read_bytes() for p in tmp_path.glob("s*")} == before
    writer.close()


def test_features_of_something_else_are_refused(small: MakeConfig, tmp_path: Path) -> None:
    shared = {"features": "disk", "store__dir": str(tmp_path / "shared")}
    run_training(small("first", **shared))
    for change, names in (({"drafter__taps": [1, 3]}, "taps"), ({"store__dtype": "bfloat16"}, "dtype")):
        with pytest.raises(ConfigError, match=f"store.dir .* holds features of other {names}; set another"):
            run_training(small("second", **shared, **change))
    with pytest.raises(ConfigError, match="documents"):
        run_training(small("second", **shared, data__row_tokens=128))
    assert not (tmp_path / "second" / "config.yaml").exists()
    run_training(small("second", **shared))


def test_the_size_is_predicted_and_printed_before_a_byte_is_written(
    small: MakeConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = small("run", features="disk")
    plan = make_plan(config, this_machine())
    decided = {d.name: d for d in plan.decisions}["features"]
    assert not (tmp_path / "run").exists()
    _, quiet, runs = run_training(config)
    keeping_ = runs[0].job.keeping
    written = sum(p.stat().st_size for p in (tmp_path / "run" / "features").iterdir())
    assert keeping_.nbytes == pytest.approx(written, rel=1e-3)
    assert str(decided.value) == f"disk, {keeping_.nbytes / 2**20:.1f} MiB"
    assert any(line.startswith(f"features: {decided.value} (4 x ") for line in quiet.lines)
    settled = tmp_path / "c.yaml"
    shutil.copy(tmp_path / "run" / "config.yaml", settled)
    assert cli.main(["train", str(settled), "--plan", "--set", f"run.dir={tmp_path}/other"]) == 0
    assert f"disk, {keeping_.nbytes / 2**20:.1f} MiB" in capsys.readouterr().out


def test_a_full_disk_is_refused_before_anything_is_written(
    small: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(keeping.shutil, "disk_usage", lambda path: usage(2**40, 2**40, 2**20))
    config = small("run", features="disk")
    with pytest.raises(InputError, match=r"has 1.0 MiB free, the features need [\d.]+ MiB more .*features=online"):
        run_training(config)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
    assert "has 1.0 MiB free" in str(make_plan(config, this_machine()).refusal)


def test_shards_that_find_no_room_are_given_up_and_training_goes_on(
    small: MakeConfig, forwards: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with room for some shards: the others are computed again, the bits are those of online training."""
    run_training(small("online"))
    online = len(forwards)
    forwards.clear()
    monkeypatch.setattr(DiskStore.__init__, "__defaults__", (2**20,))
    config = small("run", features="disk", store__dir=str(tmp_path / "disk" / "features"))
    plenty = namedtuple("usage", "total used free")(2**40, 0, 2**40)  # somebody else fills it up after the check
    monkeypatch.setattr(keeping.shutil, "disk_usage", lambda path: plenty)
    with small_disk(tmp_path / "disk", 5 * 2**19) as disk:
        _, quiet, _ = run_training(config)
        assert len(list((disk / "features").glob("shard-*.safetensors"))) >= 1
        assert not list((disk / "features").glob(".shard-*"))
    assert same_bits(config, small("online"))
    assert online // 2 < len(forwards) < online
    (said,) = [line for line in quiet.lines if line.startswith("warning: features")]
    assert re.fullmatch(
        r"warning: features of \d+ documents are not kept: .*/shard-\d+\.safetensors: No space left on device; free "
        r"some space, .*; training goes on, the target computes them again, and the next shard is tried",
        said,
    )


def test_shards_are_written_again_when_there_is_room(tmp_path: Path) -> None:
    said: list[str] = []
    kept = open_store(tmp_path, said, shard_bytes=1)
    with largest_file(100):
        kept.put([0], some_features(1))
        kept.put([1], some_features(2)[1:])
    assert kept.get([0]) is None
    kept.put([2], some_features(3)[2:])
    kept.put([0], some_features(1))
    kept.close()
    assert [line.partition(":")[0] for line in said] == ["warning", "features"]
    assert said[1].endswith("can be written again")
    again = open_store(tmp_path)
    assert again.get([0, 2]) is not None
    assert again.get([1]) is None


def test_no_handles_left_is_no_damage(tmp_path: Path) -> None:
    said: list[str] = []
    kept = open_store(tmp_path, said, shard_bytes=1)
    kept.put([0], some_features(1))
    with no_handles():
        assert kept.get([0]) is None
        assert kept.get([0]) is None
    assert kept.get([0]) is not None
    assert len(said) == 1
    assert "Too many open files; allow more open files (ulimit -n)" in said[0]
    kept.close()
    with no_handles(), pytest.raises(OSError, match="Too many open files"):
        open_store(tmp_path)
    assert not list(tmp_path.glob("*.damaged"))


def test_features_that_do_not_fit_into_memory_are_refused(small: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("run", features="memory")
    plan = make_plan(config, this_machine())
    (item,) = [item for item in plan.memory if item.name == "kept features"]
    monkeypatch.setattr(keeping, "USABLE", item.nbytes / 2 / this_machine().host_bytes)
    with pytest.raises(InputError, match=r"features: memory needs .* use store.dtype=bfloat16, features=disk"):
        run_training(config)


def test_shards_without_their_note_are_not_taken(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "s", IDENTITY, 6, torch.float32, torch.float32, print)
    disk.put(range(3), some_features(3))
    disk.close()
    (tmp_path / "s" / "store.json").unlink()
    with pytest.raises(ConfigError, match=r"holds shards but no store\.json"):
        DiskStore(tmp_path / "s", IDENTITY, 6, torch.float32, torch.float32, print)


def test_a_stray_file_beside_the_shards_stops_nobody(tmp_path: Path) -> None:
    DiskStore(tmp_path / "s", IDENTITY, 6, torch.float32, torch.float32, print).close()
    (tmp_path / "s" / "shard-copy.safetensors").write_bytes(b"")
    said: list[str] = []
    DiskStore(tmp_path / "s", IDENTITY, 6, torch.float32, torch.float32, said.append).close()
    assert "shard-copy.safetensors is damaged" in said[0]
