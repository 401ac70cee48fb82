"""Checkpoints: whole or not there, read back bit for bit, verified, and none that is needed is ever deleted."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import __version__
from draftsmith.errors import ConfigError
from draftsmith.files import file_hash
from draftsmith.pipeline.checkpoint import Checkpoint, Checkpoints, TrainState
from faults import largest_file, no_handles

FILES = ["drafter.safetensors", "manifest.json", "optimizer.safetensors", "state.json"]


def state(step: int, **changes: Any) -> TrainState:
    values: dict[str, Any] = {
        "step": step,
        "steps": 100,
        "threads": 2,
        "topology": {"target": ["cpu:0"], "drafter": ["cpu:1", "cpu:2"]},
        "target_batch_rows": 4,
        "fingerprint": "target",
        "data_fingerprint": "data",
        "held_out": True,
        "best_tau": 1.25,
        "best_step": None,
    }
    return TrainState(**(values | changes))


def checkpoint(step: int, **changes: Any) -> Checkpoint:
    g = torch.Generator().manual_seed(step)
    weights = {"fc.weight": torch.nn.Parameter(torch.randn(3, 4, generator=g).T), "norm.weight": torch.ones(2)}
    optimizer = {"fc.weight.exp_avg": torch.randn(4, 3, generator=g), "step": torch.tensor(step)}
    return Checkpoint(state(step, **changes), weights, optimizer)


def saved(folder: Path, *steps: int, keep: int = 3) -> Checkpoints:
    made = Checkpoints(folder / "run" / "checkpoints", keep)
    for step in steps:
        made.save(checkpoint(step))
    return made


def found(checkpoints: Checkpoints) -> tuple[int | None, list[str]]:
    """Step of the newest whole checkpoint, and what was warned of."""
    lines: list[str] = []
    newest = checkpoints.latest(lines.append)
    return newest and newest.state.step, lines


def change(folder: Path, name: str, content: bytes | dict[str, Any]) -> None:
    """Replaces a file, or keys of a JSON file, and makes the checksums fit."""
    path = folder / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content).encode()
    path.write_bytes(content)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {name: file_hash(path)}))


def test_what_was_saved_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    """Also what is not contiguous, carries a gradient or is no matrix."""
    checkpoints, wanted = saved(tmp_path), checkpoint(7, best_tau=None)
    folder = checkpoints.save(wanted)
    assert folder == tmp_path / "run" / "checkpoints" / "step-7"
    assert sorted(os.listdir(folder)) == FILES
    assert os.listdir(folder.parent) == ["step-7"], "nothing is left aside"
    got = checkpoints.latest(pytest.fail)
    assert got is not None
    assert got.state == wanted.state
    for mine, theirs in ((got.weights, wanted.weights), (got.optimizer, wanted.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine)


def test_files_say_what_they_are(tmp_path: Path) -> None:
    """Sums of all but the manifest, the format and its writer, and text that a person can read."""
    folder = saved(tmp_path, 7).folder / "step-7"
    sums = json.loads((folder / "manifest.json").read_text())
    assert sums == {name: file_hash(folder / name) for name in FILES if name != "manifest.json"}
    text = (folder / "state.json").read_text()
    assert text.startswith(f'{{\n  "format": 1,\n  "draftsmith": "{__version__}",\n  "step": 7,\n')
    assert text.endswith("}\n")
    assert (folder / "manifest.json").read_text() == json.dumps(sums, indent=2) + "\n"


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 4)
    checkpoints.save(checkpoint(4, threads=5))
    got = checkpoints.latest(pytest.fail)
    assert got is not None
    assert got.state.threads == 5


def test_steps_are_numbers_and_nothing_else_is_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 10, 9, 2)
    for name in ("step-3.damaged", "step-", "step-x", ".step-4.new", "my-step-5", "step-6 "):
        (checkpoints.folder / name).mkdir()
    assert checkpoints.steps() == [2, 9, 10]


def test_no_folder_has_no_steps(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", 3).steps() == []
    assert found(Checkpoints(tmp_path / "none", 3)) == (None, [])


@pytest.mark.parametrize(
    ("steps", "last", "keep", "best", "left"),
    [
        ([1, 2, 3, 4, 5], 5, 3, None, [3, 4, 5]),
        ([1, 2, 3, 4, 5], 5, 1, None, [5]),
        ([1, 2, 3, 4, 5], 5, 9, None, [1, 2, 3, 4, 5]),
        ([4, 5], 5, 2, None, [4, 5]),
        ([1, 3, 5, 6, 7], 3, 1, None, [3, 5, 6, 7]),  # what is newer than the one just saved stays
        ([1, 3, 5, 6, 7], 3, 2, None, [1, 3, 5, 6, 7]),
        ([1, 2, 3, 4, 5], 5, 2, 2, [2, 4, 5]),  # so does the best
        ([1, 2, 3, 4, 5], 5, 2, 4, [4, 5]),
        ([1, 2, 3, 4, 5], 5, 2, 5, [4, 5]),
    ],
)
def test_what_is_kept(
    tmp_path: Path, steps: list[int], last: int, keep: int, best: int | None, left: list[int]
) -> None:
    checkpoints = saved(tmp_path, *steps, keep=keep)
    checkpoints.drop_old(state(last, best_step=best))
    assert checkpoints.steps() == left
    assert sorted(os.listdir(checkpoints.folder)) == [f"step-{step}" for step in left]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("manifest.json", bytes(range(128, 256)), "UnicodeDecodeError: "),
        ("manifest.json", b"{}", r"its manifest names \[\]; "),
        ("manifest.json", b"[]", "damaged"),
        ("manifest.json", b"5", "Error: "),
        ("manifest.json", None, "FileNotFoundError: "),
        ("state.json", b"{}", "state.json does not match its checksum; "),
        ("state.json", b"[]", "AttributeError: "),
        ("state.json", None, "FileNotFoundError: "),
        ("drafter.safetensors", b"short", "drafter.safetensors does not match its checksum; "),
        ("drafter.safetensors", None, "FileNotFoundError: "),
        ("optimizer.safetensors", b"", "optimizer.safetensors does not match its checksum; "),
    ],
)
def test_any_damage_falls_back_to_the_checkpoint_before(
    tmp_path: Path, name: str, content: bytes | None, told: str
) -> None:
    checkpoints = saved(tmp_path, 2, 4)
    victim = checkpoints.folder / "step-4" / name
    victim.unlink() if content is None else victim.write_bytes(content)
    step, lines = found(checkpoints)
    assert (step, len(lines)) == (2, 1)
    assert lines[0].startswith(f"checkpoint {checkpoints.folder / 'step-4'} is damaged: ")
    assert re.search(told, lines[0])
    assert lines[0].endswith("; renamed to step-4.damaged, going back to the one before")
    assert sorted(os.listdir(checkpoints.folder)) == ["step-2", "step-4.damaged"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"step": "4"}, "ValidationError: "),
        ({"step": 3}, "it is of step 3; "),
        ({"steps": 4.5}, "ValidationError: "),
        ({"best_tau": "x"}, "ValidationError: "),
        ({"topology": []}, "ValidationError: "),
    ],
    ids=str,
)
def test_a_state_of_wrong_types_is_damage(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    """Also when the checksums were made to fit."""
    checkpoints = saved(tmp_path, 2, 4)
    change(checkpoints.folder / "step-4", "state.json", changes)
    step, lines = found(checkpoints)
    assert (step, len(lines)) == (2, 1)
    assert re.search(told, lines[0])


def test_tensors_that_are_none_are_damage(tmp_path: Path) -> None:
    """Also when the checksums were made to fit."""
    for name in ("drafter.safetensors", "optimizer.safetensors"):
        checkpoints = saved(tmp_path, 2, 4)
        change(checkpoints.folder / "step-4", name, b"short")
        step, lines = found(checkpoints)
        assert (step, len(lines)) == (2, 1)
        assert "SafetensorError: " in lines[0]


def test_damaged_ones_never_replace_each_other(tmp_path: Path) -> None:
    for number in range(3):
        checkpoints = saved(tmp_path, 4)
        (checkpoints.folder / "step-4" / "manifest.json").write_text(f"damage {number}")
        assert found(checkpoints)[0] is None
    names = ["step-4.damaged", "step-4.damaged-2", "step-4.damaged-3"]
    assert sorted(os.listdir(checkpoints.folder)) == names
    for number, name in enumerate(names):
        assert (checkpoints.folder / name / "manifest.json").read_text() == f"damage {number}"


def test_if_all_are_damaged_there_is_none_and_each_is_told(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        (checkpoints.folder / f"step-{step}" / "state.json").unlink()
    step, lines = found(checkpoints)
    assert step is None
    assert [re.search(r"step-\d", line)[0] for line in lines] == ["step-3", "step-2", "step-1"]


def test_a_checkpoint_of_another_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2, 4)
    change(checkpoints.folder / "step-4", "state.json", {"format": 2, "draftsmith": "9.9"})
    with pytest.raises(ConfigError) as refused:
        checkpoints.latest(pytest.fail)
    assert str(refused.value) == (
        f"resume: checkpoint {checkpoints.folder / 'step-4'} has format 2, written by draftsmith 9.9; draftsmith "
        f"{__version__} reads format 1. Resume with that version, or start a new run with drafter.init set to this "
        "run's draft folder"
    )
    change(checkpoints.folder / "step-4", "manifest.json", {"a file of that format": "its sum"})
    with pytest.raises(ConfigError, match="has format 2"):
        checkpoints.latest(pytest.fail)
    assert checkpoints.steps() == [2, 4]


def test_an_unknown_writer_and_a_state_without_a_format(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 4)
    folder = checkpoints.folder / "step-4"
    plain = json.loads((folder / "state.json").read_text())
    del plain["format"], plain["draftsmith"]
    change(folder, "state.json", json.dumps(plain).encode())
    assert found(checkpoints) == (4, []), "the first format did not say so"
    change(folder, "state.json", {"format": 7})
    with pytest.raises(ConfigError, match="written by draftsmith another version; "):
        checkpoints.latest(pytest.fail)


def test_another_format_that_fits_no_checksum_is_damage(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2, 4)
    path = checkpoints.folder / "step-4" / "state.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    step, lines = found(checkpoints)
    assert step == 2
    assert "state.json does not match its checksum" in lines[0]


def test_a_checkpoint_that_cannot_be_opened_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not be passed over: the fault is the machine's."""
    checkpoints = saved(tmp_path, 2, 4)
    with no_handles(), pytest.raises(OSError, match=r"Too many open files: .*checkpoints'"):
        checkpoints.latest(pytest.fail)
    monkeypatch.setattr(checkpoints, "steps", lambda: [2, 4])  # as if the handles had run out a moment later
    with no_handles(), pytest.raises(OSError, match=r"Too many open files: .*manifest\.json'"):
        checkpoints.latest(pytest.fail)
    assert found(checkpoints) == (4, [])


def test_a_save_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2, 4)
    before = {path: path.read_bytes() for path in checkpoints.folder.rglob("*") if path.is_file()}
    for step in (4, 6):
        with largest_file(100), pytest.raises(OSError, match=f"step-{step}"):
            checkpoints.save(checkpoint(step, threads=9))
    assert {path: path.read_bytes() for path in checkpoints.folder.rglob("*") if path.is_file()} == before
    assert sorted(os.listdir(checkpoints.folder)) == ["step-2", "step-4"]


def test_what_a_kill_left_is_cleared_up(tmp_path: Path) -> None:
    """Killed while `step-4` was replaced, and while `step-6` was written: the one is back, the other never was."""
    checkpoints = saved(tmp_path, 2, 4)
    (checkpoints.folder / "step-4").rename(checkpoints.folder / ".step-4.old")
    (checkpoints.folder / ".step-4.new").mkdir()
    (checkpoints.folder / ".step-6.new").mkdir()
    (checkpoints.folder / ".other.new").mkdir()
    checkpoints.recover()
    assert sorted(os.listdir(checkpoints.folder)) == [".other.new", "step-2", "step-4"]
    assert found(checkpoints) == (4, [])
