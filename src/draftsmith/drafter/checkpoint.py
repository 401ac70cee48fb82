"""A drafter folder: what the reference package, vLLM and SGLang load unchanged, plus a note of where it came from."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError, InputError
from draftsmith.files import folder_aside
from draftsmith.hub_names import is_hub_name, pinned
from draftsmith.tensors import save_tensors

PROVENANCE = "draftsmith.json"
MASK_EMBEDDING = "mask_embedding.pt"  # of some other trainers


def save_drafter(
    folder: Path, drafter: Drafter, *, dtype: torch.dtype, provenance: Mapping[str, Any], card: str
) -> None:
    """Writes `config.json`, `model.safetensors` (no metadata but its format), `draftsmith.json` and a model card."""
    tensors = {name: tensor.to("cpu", dtype) for name, tensor in drafter.state_dict().items()}
    config = drafter.config.to_json(str(dtype).removeprefix("torch."))
    write_folder(folder, tensors, {"config.json": to_text(config), PROVENANCE: to_text(provenance), "README.md": card})


def to_text(data: Mapping[str, Any]) -> str:
    """JSON as every file of a drafter folder has it."""
    return json.dumps(dict(data), indent=2) + "\n"


def write_folder(folder: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Writes `model.safetensors` and text files by name.

    The folder appears whole or not at all: it is written beside and renamed; an older one is replaced, and nothing but
    a folder ever is.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"{folder} is there and no folder; choose another name")
    with folder_aside(folder) as aside:
        save_tensors(tensors, aside / "model.safetensors")
        for name, text in texts.items():
            (aside / name).write_text(text, encoding="utf-8")


def load_drafter(folder: Path, device: torch.device) -> Drafter:
    """A drafter for decoding, in fp32 on CPU, whatever the file stores; in the file's dtype elsewhere.

    Raises:
        InputError: the folder is no drafter, or tensors are missing, unknown, damaged or of another shape.
    """
    config = DrafterConfig.read(folder)
    tensors = read_tensors(folder)
    check_tensors(tensors, expected_shapes(config), f"{folder}/model.safetensors", "config.json says")
    drafter = Drafter(config)
    dtype = torch.float32 if device.type == "cpu" else tensors["fc.weight"].dtype
    drafter.load_state_dict(tensors)
    return drafter.to(device, dtype).eval().requires_grad_(False)


def expected_shapes(config: DrafterConfig) -> dict[str, torch.Size]:
    """Name and shape of every tensor that a drafter of this shape stores."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Drafter(config).state_dict().items()}


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], place: str, says: str) -> None:
    """Exactly these names with these shapes.

    Args:
        place: the file or setting an error is about.
        says: who expects another shape, e.g. `config.json says`.

    Raises:
        InputError: names the first tensors that are missing, unknown or of another shape.
    """
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or extra:
        found = [f"{len(n)} {what} ({', '.join(n[:3])})" for n, what in ((missing, "missing"), (extra, "unknown")) if n]
        raise InputError(f"{place}: tensors {' and '.join(found)}; layers, bias and kind must match the config")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise InputError(f"{place}: {name} is {tuple(tensor.shape)}, {says} {tuple(shapes[name])}")


def check_target(config: DrafterConfig, target_config: Any, draft: str, target: str) -> None:
    """Whether a drafter was made for a target of this shape.

    Args:
        target_config: the text part of the target's `config.json`.
        draft, target: what the user calls them.

    Raises:
        InputError: names what differs.
    """
    pairs = {
        "layers": (config.num_target_layers, target_config.num_hidden_layers),
        "hidden size": (config.hidden_size, target_config.hidden_size),
        "vocabulary": (config.vocab_size, target_config.vocab_size),
    }
    other = [f"{name} {ours}, not {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if other:
        raise InputError(f"{draft} was made for another target than {target}: {', '.join(other)}")


def find_drafter(name: str, *, weights: bool = True, setting: str = "drafter.init") -> Path:
    """A drafter folder, or that of a hub id (`owner/name`, perhaps `@revision`), downloaded if need be; without
    weights, its config only.

    `setting` is what the user calls the name.

    Raises:
        ConfigError: neither a folder nor a hub id.
        InputError: the hub does not give it.
    """
    if Path(name).is_dir():
        return Path(name)
    if not is_hub_name(name):
        choices = "target, random, or " if setting == "drafter.init" else ""
        raise ConfigError(f"{setting} is {name!r}: give {choices}an existing drafter folder or hub id (owner/name)")
    try:
        wanted = ["config.json", "model.safetensors", PROVENANCE, MASK_EMBEDDING] if weights else ["config.json"]
        repository, revision = pinned(name)
        return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        raise InputError(
            f"{setting} {name} is no folder here, and the hub does not give it ({type(error).__name__}); check the "
            "name and the connection, or download it and give its folder"
        ) from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `folder/model.safetensors`, all of them floating point and finite.

    Raises:
        InputError: the file is not there, cut short or damaged, a tensor holds NaN or infinity, or a mask embedding
            lies beside it.
    """
    path = folder / "model.safetensors"
    if (folder / MASK_EMBEDDING).is_file():
        raise InputError(
            f"{folder}/{MASK_EMBEDDING} replaces a row of the target's embedding in vLLM and SGLang, and not in "
            "the reference; such drafters are not supported"
        )
    if not path.is_file() and (folder / f"{path.name}.index.json").is_file():
        raise InputError(f"{folder} holds its tensors in several files; save them as one model.safetensors")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path} is damaged or cut short ({error}); copy it again") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise InputError(f"{path}: {name} is stored as {tensor.dtype}; quantised drafters are not supported")
        if not tensor.isfinite().all():
            raise InputError(f"{path}: {name} holds NaN or infinite values; the training that wrote it had diverged")
    return tensors


def read_provenance(folder: Path) -> dict[str, Any]:
    """What draftsmith noted when it wrote the folder; empty for a drafter of another trainer."""
    path = folder / PROVENANCE
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start}); mend or remove it") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} is no JSON object; mend or remove it")
    for key in ("target", "target_revision", "target_adapter", "target_fingerprint"):
        if not isinstance(data.get(key), str | None):
            raise InputError(f"{path}: {key} is {data[key]!r}, expected a string; mend or remove it")
    return data
