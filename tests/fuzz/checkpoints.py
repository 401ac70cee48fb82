"""Checkpoints: the files of a saved one damaged or changed, with checksums that no longer fit, or made to fit."""

import json
import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from conftest import tiny_drafter
from draftsmith import embedded
from draftsmith.config import load_config
from draftsmith.decisions import Ledger
from draftsmith.drafter.model import Drafter
from draftsmith.errors import InputError
from draftsmith.pipeline.checkpoint import Checkpoint, Checkpoints, TrainState
from draftsmith.pipeline.machine import this_machine
from draftsmith.pipeline.optim import Optimizers, load_weights
from draftsmith.pipeline.prepare import Resolved, outline
from fuzz.fuzzing import changed, damaged, one_line
from fuzz.tensors import changed_tensors

FILES = ("manifest.json", "state.json", "drafter.safetensors", "optimizer.safetensors")
DRAFTER = tiny_drafter(hidden_size=8, intermediate_size=8, vocab_size=64, head_dim=2)
CONFIG = load_config(embedded.CONFIG)
STATE = TrainState(
    step=4, steps=9, threads=1, topology={"target": ["cpu:0"], "drafter": ["cpu:1"]}, target_batch_rows=1,
    fingerprint="f", data_fingerprint="d", held_out=False, best_tau=1.5, best_step=2,
)  # fmt: skip


@dataclass(frozen=True)
class Example:
    """Files to write into `step-4` (None: removed), and whether the manifest is made to fit them."""

    files: dict[str, bytes | None]
    fits: bool


def _optimizers(drafter: Drafter) -> Optimizers:
    return Optimizers(drafter, "adamw", lr=1e-3, matrix_lr=1e-3, weight_decay=0.0)


def _checkpoint(step: int) -> Checkpoint:
    drafter = deepcopy(DRAFTER)
    optimizers = _optimizers(drafter)
    for parameter in drafter.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizers.step(1.0)  # makes their state
    state = TrainState(**{**{name: getattr(STATE, name) for name in TrainState.__slots__}, "step": step})
    return Checkpoint(state, drafter.state_dict(), optimizers.state())


def _saved() -> dict[str, bytes]:
    """Every file of a whole checkpoint."""
    with tempfile.TemporaryDirectory() as place:
        folder = Checkpoints(Path(place), keep=3).save(_checkpoint(4))
        return {item.name: item.read_bytes() for item in folder.iterdir()}


def examples() -> st.SearchStrategy[Example]:
    return _examples(_saved())


@st.composite
def _examples(draw: st.DrawFn, saved: dict[str, bytes]) -> Example:
    files: dict[str, bytes | None] = {}
    for name in draw(st.lists(st.sampled_from(sorted(saved)), min_size=1, max_size=2, unique=True)):
        kind = draw(st.sampled_from(["damage", "change", "change", "remove"]))
        if kind == "remove":
            files[name] = None
        elif kind == "damage":
            files[name] = draw(damaged(saved[name]))
        elif name.endswith(".json"):
            files[name] = json.dumps(draw(changed(json.loads(saved[name])))).encode()
        else:
            files[name] = draw(changed_tensors(saved[name]))
    return Example(files, draw(st.booleans()))


def checker(folder: Path) -> Callable[[Example], None]:
    whole = folder / "whole"
    Checkpoints(whole, keep=3).save(_checkpoint(2))
    Checkpoints(whole, keep=3).save(_checkpoint(4))
    before = _content(whole / "step-4")

    def check(example: Example) -> None:
        place = folder / "checkpoints"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place)
        after = _write(place / "step-4", example)
        warnings: list[str] = []
        try:
            found = Checkpoints(place, keep=3).latest(warnings.append)
        except InputError as error:  # of a version that this program does not know
            one_line(error)
            return
        assert found is not None, warnings
        kept = {item.name for item in place.iterdir()}
        if found.state.step == 4:
            assert kept == {"step-2", "step-4"}
            assert after == before or example.fits  # what the manifest covers
        else:  # the damaged one is out of the way, with all that was in it
            assert kept == {"step-2", "step-4.damaged"}
            assert len(warnings) == 1
        _restore(found)

    return check


def _restore(found: Checkpoint) -> None:
    """As a resumed run does."""
    drafter, state = Drafter(DRAFTER.config), found.state
    try:
        resolved = Resolved(state.topology, state.threads, state.held_out)
        known = outline(CONFIG, this_machine(), Ledger(), resolved)
        assert known.topology.workers >= 2
        torch.set_num_threads(known.threads)
        load_weights(drafter, found.weights)
        _optimizers(drafter).load_state(found.optimizer)
    except InputError as error:
        one_line(error)
    else:
        torch.set_num_threads(1)
        assert all(torch.equal(t, found.weights[name]) for name, t in drafter.state_dict().items())


def _write(folder: Path, example: Example) -> dict[str, bytes]:
    """Returns what is in the folder then."""
    for name, content in example.files.items():
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
    if example.fits and (folder / "manifest.json").exists():
        _fit(folder)
    return _content(folder)


def _content(folder: Path) -> dict[str, bytes]:
    """All but the manifest, which may be written in other ways and say the same."""
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.name != "manifest.json"}


def _fit(folder: Path) -> None:
    """Gives every file that the manifest names its new checksum, in whatever layout the manifest has."""
    path = folder / "manifest.json"
    try:
        manifest: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    sums = {item.name: sha256(item.read_bytes()).hexdigest() for item in folder.iterdir()}
    path.write_text(json.dumps(_fitted(manifest, sums)))


def _fitted(value: Any, sums: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: sums[key] if key in sums else _fitted(inner, sums) for key, inner in value.items()}
    return value
