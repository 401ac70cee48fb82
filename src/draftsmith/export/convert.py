"""`draftsmith export` and `draftsmith import`: one drafter in another layout, its tensors bit for bit."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith import __version__
from draftsmith.drafter.checkpoint import (
    PROVENANCE,
    check_target,
    check_tensors,
    expected_shapes,
    find_drafter,
    read_provenance,
    read_tensors,
    to_text,
    write_folder,
)
from draftsmith.drafter.config import DrafterConfig, read_json
from draftsmith.errors import ConfigError, InputError
from draftsmith.export import speculators
from draftsmith.export.servers import READERS, SPECULATORS, ZLAB, disagreements
from draftsmith.target.load import TargetSpec, frozen_weights

CARD = "README.md"


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """A drafter as a folder stores it, not a bit changed. `texts` are the files that go along, by name.

    `left_out` names tensors that are the target's own and not the drafter's.
    """

    config: DrafterConfig
    tensors: dict[str, Tensor]
    layout: str
    texts: dict[str, str]
    left_out: tuple[str, ...]

    @property
    def dtype(self) -> str:
        return str(self.tensors["fc.weight"].dtype).removeprefix("torch.")


def export_drafter(source: str, layout: str, out: Path, target: TargetSpec | None = None) -> list[str]:
    """Writes a drafter in a layout, if everyone who reads that layout makes the same drafter of it.

    Args:
        source: folder or hub id of a drafter, in either layout.
        layout: `zlab` or `speculators`.
        out: a folder that does not exist or is empty.
        target: for the speculators layout, which holds its embedding and head; default: what the drafter was trained
            for.

    Returns:
        Lines that say what was written and who reads it.

    Raises:
        ConfigError: `out` is taken, or there is no such drafter.
        InputError: the drafter is malformed, its target is unknown or another, or readers would disagree.
    """
    check_free(out)
    folder = find_drafter(source, setting="DIR")
    stored = read_stored(folder, source, target)
    reasons = disagreements(stored.config, layout)
    if reasons:
        raise InputError(f"{source} cannot be exported to {layout}: {'; '.join(reasons)}")
    if layout == SPECULATORS:
        _write_speculators(out, stored, target or _trained_for(folder))
    else:
        _write_zlab(out, stored)
    return [f"{out}: {layout} layout, {len(stored.tensors)} tensors in {stored.dtype}", *_notes(stored, layout)]


def import_drafter(source: str, out: Path, target: TargetSpec | None = None) -> list[str]:
    """Writes a drafter of either layout as a folder of ours: for `eval`, and for `drafter.init` as a warm start.

    Takes also drafters that servers read differently; exporting those is refused.

    Args:
        source: folder or hub id of a drafter.
        out: a folder that does not exist or is empty.
        target: its depth is needed for a speculators folder of another trainer; the drafter must fit it, and an
            embedding and head inside must be its own.

    Returns:
        Lines that say what was written.

    Raises:
        ConfigError: `out` is taken, or there is no such drafter.
        InputError: the drafter is malformed, or made for another target.
    """
    check_free(out)
    folder = find_drafter(source, setting="DIR")
    stored = read_stored(folder, source, target)
    if target and stored.left_out:
        frozen = speculators.frozen_copies(*frozen_weights(target, target.model_with_adapter("auto")), stored.config)
        speculators.check_frozen(read_tensors(folder), frozen, f"{folder}/model.safetensors", target.model)
    _write_zlab(out, stored)
    lines = [f"{out}: {len(stored.tensors)} tensors in {stored.dtype}, read from the {stored.layout} layout"]
    if stored.left_out:
        lines.append(f"left out, being the target's own: {', '.join(stored.left_out)}")
    reasons = disagreements(stored.config, ZLAB)
    return lines + [f"for evaluation only: {reason}" for reason in reasons]


def check_free(out: Path) -> None:
    """Nothing is overwritten.

    Raises:
        ConfigError: something is there already (a file, a link, a device, a folder with something in it), or it is the
            folder this process stands in, which cannot be put in place whole.
    """
    empty_folder = out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    if os.path.lexists(out) and not empty_folder:
        raise ConfigError(f"OUT {out} is there already; give a new folder")
    if out.resolve() == Path.cwd():
        raise ConfigError(f"OUT {out} is the folder you are in; give a new folder")


def read_stored(folder: Path, source: str, target: TargetSpec | None) -> Stored:
    """A drafter folder of either layout, checked as for loading.

    Raises:
        InputError: it is malformed, or does not fit the target.
    """
    path = folder / "config.json"
    data = read_json(path)
    target_config = target.config() if target else None
    if speculators.is_speculators(data):
        depth = target_config.num_hidden_layers if target_config is not None else None
        layout, config = SPECULATORS, speculators.from_json(data, path, depth)
        stored = read_tensors(folder)
        tensors = speculators.without_frozen(stored, config, folder / "model.safetensors")
    else:
        layout, config = ZLAB, DrafterConfig.read(folder)
        stored = tensors = read_tensors(folder)
    check_tensors(tensors, expected_shapes(config), f"{folder}/model.safetensors", "config.json says")
    if target and target_config is not None:
        check_target(config, target_config, source, target.model)
    left_out = tuple(sorted(stored.keys() - tensors.keys()))
    return Stored(config, tensors, layout, _companions(folder, source, layout), left_out)


def _companions(folder: Path, source: str, layout: str) -> dict[str, str]:
    """Our own notes and card go along unchanged; a drafter of another trainer gets a note of where it came from."""
    ours = {name: folder / name for name in (PROVENANCE, CARD)}
    if ours[PROVENANCE].is_file():
        return {name: _read_text(path) for name, path in ours.items() if path.is_file()}
    return {PROVENANCE: to_text({"draftsmith": __version__, "imported_from": source, "layout": layout})}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start}); mend or remove it") from None


def _write_zlab(out: Path, stored: Stored) -> None:
    write_folder(out, stored.tensors, {"config.json": to_text(stored.config.to_json(stored.dtype)), **stored.texts})


def _write_speculators(out: Path, stored: Stored, target: TargetSpec) -> None:
    """The target is loaded whole, in the dtype it is stored in: an adapter may have changed what is copied."""
    target_config = target.config()
    check_target(stored.config, target_config, "DIR", target.model)
    frozen = speculators.frozen_copies(*frozen_weights(target, target.model_with_adapter("auto")), stored.config)
    local = Path(target.path).is_dir()
    name = None if target.adapter else str(Path(target.path).resolve()) if local else target.path
    config = speculators.to_json(stored.config, stored.dtype, name, target_config.architectures or [])
    write_folder(out, {**stored.tensors, **frozen}, {"config.json": to_text(config), **stored.texts})


def _trained_for(folder: Path) -> TargetSpec:
    """The target that `draftsmith.json` names."""
    known: dict[str, Any] = read_provenance(folder)
    if not known.get("target"):
        raise InputError(f"{folder} does not say what target it was trained for; give it with --target")
    return TargetSpec(known["target"], revision=known.get("target_revision"), adapter=known.get("target_adapter"))


def _notes(stored: Stored, layout: str) -> list[str]:
    size = stored.config.block_size
    return [
        f"read alike by {', '.join(READERS[layout])}",
        f"block size {size}: vLLM's num_speculative_tokens is {size - 1}"
        + (f", SGLang's --speculative-num-draft-tokens {size}" if layout == ZLAB else ""),
    ]
