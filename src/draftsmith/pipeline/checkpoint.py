"""Checkpoints that are whole or not there: written aside, synced, renamed; verified when read; never pickle."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafter.checkpoint import remove_tree, replace_folder
from draftsmith.errors import InputError
from draftsmith.files import file_hash

_WHOLE = re.compile(r"step-(\d+)")


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
    """The `checkpoints/` folder of a run. Used by one thread at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes `step-N` and drops the oldest beyond `keep`; a newer one is never deleted."""
        step = checkpoint.state.step
        final, aside = self.folder / f"step-{step}", self.folder / f".step-{step}.new"
        remove_tree(aside)
        aside.mkdir(parents=True)
        save_file(_contiguous(checkpoint.weights), aside / "drafter.safetensors", metadata={"format": "pt"})
        save_file(_contiguous(checkpoint.optimizer), aside / "optimizer.safetensors", metadata={"format": "pt"})
        (aside / "state.json").write_text(json.dumps(asdict(checkpoint.state), indent=2) + "\n")
        sums = {item.name: file_hash(item) for item in sorted(aside.iterdir())}
        (aside / "manifest.json").write_text(json.dumps(sums, indent=2) + "\n")
        replace_folder(aside, final)
        for old in [n for n in self.steps() if n < step][: -(self.keep - 1) or None]:
            remove_tree(self.folder / f"step-{old}")
        return final

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_WHOLE.fullmatch(item.name) for item in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint. A damaged one is renamed `step-N.damaged`, with a warning, and passed over."""
        for step in reversed(self.steps()):
            folder = self.folder / f"step-{step}"
            try:
                return _read(folder)
            except InputError as error:
                aside = _free_name(folder)
                folder.rename(aside)
                warn(f"{error}; renamed to {aside.name}, going back to the one before")
        return None


def _read(folder: Path) -> Checkpoint:
    try:
        sums = json.loads((folder / "manifest.json").read_text())
        if set(sums) != {"drafter.safetensors", "optimizer.safetensors", "state.json"}:
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
        raise InputError(f"checkpoint {folder} is damaged: {type(error).__name__}: {error}") from None


_STATE = TypeAdapter(TrainState)  # a missing key or a wrong type is a ValueError


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _free_name(folder: Path) -> Path:
    name = folder.with_name(f"{folder.name}.damaged")
    number = 2
    while name.exists():
        name = folder.with_name(f"{folder.name}.damaged-{number}")
        number += 1
    return name
