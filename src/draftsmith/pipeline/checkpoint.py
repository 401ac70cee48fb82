"""Checkpoints that are whole or not there: written aside, synced, renamed; verified when read; never pickle."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith import __version__
from draftsmith.errors import ConfigError, InputError
from draftsmith.files import file_hash, folder_aside, is_damage, recover_all, remove_folder
from draftsmith.tensors import save_tensors

FORMAT = 1  # of a checkpoint; one that does not say has 1
_WHOLE = re.compile(r"step-(\d+)")
_FILES = ("drafter.safetensors", "optimizer.safetensors", "state.json")


@dataclass(frozen=True, slots=True)
class TrainState:
    """The counters of a run. Together with the tensors and the run's config they decide everything that follows:
    rows, anchors and learning rates are functions of the step."""

    step: int
    steps: int
    threads: int
    topology: dict[str, list[str]]
    target_batch_rows: int
    fingerprint: str  # of the target
    data_fingerprint: str
    held_out: bool
    best_tau: float | None
    best_step: int | None


@dataclass(frozen=True, eq=False, slots=True)
class Checkpoint:
    """fp32 master weights, optimizer state and counters after `state.step` steps."""

    state: TrainState
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


class Checkpoints:
    """The `checkpoints/` folder of a run. Used by one thread at a time, of the process that holds the run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def recover(self) -> None:
        """Clears up after a process that was killed while it saved: a checkpoint is the old one or the new one."""
        recover_all(self.folder, "step-*")

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes `step-N`. It is there whole, on the disk, or as if nothing had been tried.

        Raises:
            OSError: it cannot be written.
        """
        final = self.folder / f"step-{checkpoint.state.step}"
        state = {"format": FORMAT, "draftsmith": __version__, **asdict(checkpoint.state)}
        with folder_aside(final) as aside:
            save_tensors(checkpoint.weights, aside / "drafter.safetensors")
            save_tensors(checkpoint.optimizer, aside / "optimizer.safetensors")
            (aside / "state.json").write_text(json.dumps(state, indent=2) + "\n")
            sums = {name: file_hash(aside / name) for name in _FILES}
            (aside / "manifest.json").write_text(json.dumps(sums, indent=2) + "\n")
        return final

    def drop_old(self, saved: TrainState) -> None:
        """Deletes the oldest beyond `keep`, but none that is newer than the one saved, nor the best one."""
        older = [step for step in self.steps() if step < saved.step]
        for step in older[: max(0, len(older) + 1 - self.keep)]:
            if step != saved.best_step:
                remove_folder(self.folder / f"step-{step}")

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_WHOLE.fullmatch(item.name) for item in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint. A damaged one is renamed `step-N.damaged`, with a warning, and passed over.

        Raises:
            ConfigError: another version of draftsmith wrote it, in a format that this one does not know.
            OSError: this process may not or cannot read it, which is no damage.
        """
        for step in reversed(self.steps()):
            folder = self.folder / f"step-{step}"
            try:
                return _read(folder)
            except ConfigError:
                raise
            except InputError as error:
                aside = _free_name(folder)
                folder.rename(aside)
                warn(f"{error}; renamed to {aside.name}, going back to the one before")
        return None


def _read(folder: Path) -> Checkpoint:
    try:
        sums = json.loads((folder / "manifest.json").read_text())
        _check_format(folder, sums)
        if set(sums) != set(_FILES):
            raise InputError(f"checkpoint {folder} is damaged: its manifest names {sorted(sums)}")
        for name, expected in sums.items():
            if file_hash(folder / name) != expected:
                raise InputError(f"checkpoint {folder} is damaged: {name} does not match its checksum")
        state = _STATE.validate_json((folder / "state.json").read_bytes(), strict=True)
        if folder.name != f"step-{state.step}":
            raise InputError(f"checkpoint {folder} is damaged: it is of step {state.step}")
        weights, optimizer = load_file(folder / "drafter.safetensors"), load_file(folder / "optimizer.safetensors")
        return Checkpoint(state, weights, optimizer)
    except InputError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, KeyError, SafetensorError) as error:
        if not is_damage(error):
            raise
        raise InputError(f"checkpoint {folder} is damaged: {type(error).__name__}: {error}") from None


_STATE = TypeAdapter(TrainState)  # a missing key or a wrong type is a ValueError


def _check_format(folder: Path, sums: dict[str, str]) -> None:
    """A checkpoint of another format is none of ours to judge, unless its state is damaged."""
    path = folder / "state.json"
    state = json.loads(path.read_text())
    if state.get("format", FORMAT) != FORMAT and sums.get(path.name) == file_hash(path):
        writer, ours = state.get("draftsmith", "another version"), f"draftsmith {__version__} reads format {FORMAT}"
        raise ConfigError(
            f"resume: checkpoint {folder} has format {state['format']}, written by draftsmith {writer}; {ours}. Resume "
            "with that version, or start a new run with drafter.init set to this run's draft folder"
        )


def _free_name(folder: Path) -> Path:
    name = folder.with_name(f"{folder.name}.damaged")
    number = 2
    while name.exists():
        name = folder.with_name(f"{folder.name}.damaged-{number}")
        number += 1
    return name
