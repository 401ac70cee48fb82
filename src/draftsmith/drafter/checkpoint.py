"""A drafter folder: what the reference package, vLLM and SGLang load unchanged, plus a note of where it came from."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError, InputError

PROVENANCE = "draftsmith.json"


def save_drafter(
    folder: Path, drafter: Drafter, *, dtype: torch.dtype, provenance: Mapping[str, Any], card: str
) -> None:
    """Writes `config.json`, `model.safetensors` (no metadata but its format), `draftsmith.json` and a model card.

    The folder appears whole or not at all: it is written beside and renamed; an older one is replaced.
    """
    aside = folder.with_name(f".{folder.name}.new")
    remove_tree(aside)
    aside.mkdir(parents=True)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in drafter.state_dict().items()}
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    config = drafter.config.to_json(str(dtype).removeprefix("torch."))
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (aside / PROVENANCE).write_text(json.dumps(dict(provenance), indent=2) + "\n")
    (aside / "README.md").write_text(card)
    replace_folder(aside, folder)


def load_drafter(folder: Path, device: torch.device) -> Drafter:
    """A drafter for decoding, in fp32 on CPU, whatever the file stores; in the file's dtype elsewhere.

    Raises:
        InputError: the folder is no drafter, or tensors are missing, unknown or of another shape.
    """
    config = DrafterConfig.read(folder)
    tensors = read_tensors(folder)
    drafter = Drafter(config)
    expected = drafter.state_dict()
    if expected.keys() != tensors.keys():
        missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
        raise InputError(f"{folder}/model.safetensors: tensors missing {missing[:3]}, unknown {extra[:3]}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise InputError(
                f"{folder}/model.safetensors: {name} is {tuple(tensor.shape)}, config.json says "
                f"{tuple(expected[name].shape)}"
            )
    dtype = torch.float32 if device.type == "cpu" else next(iter(tensors.values())).dtype
    drafter.load_state_dict(tensors)
    return drafter.to(device, dtype).eval().requires_grad_(False)


def find_drafter(name: str, *, weights: bool = True) -> Path:
    """A drafter folder, or that of a hub id (`owner/name`), downloaded if need be; without weights, its config only.

    Raises:
        ConfigError: neither a folder nor a hub id.
        InputError: the hub does not give it.
    """
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise ConfigError(
            f"drafter.init is {name!r}: give target, random, or an existing drafter folder or hub id (owner/name)"
        )
    try:
        wanted = ["config.json", "model.safetensors"] if weights else ["config.json"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        raise InputError(
            f"drafter.init {name} is no folder here, and the hub does not give it ({type(error).__name__}); check the "
            "name and the connection, or download it and give its folder"
        ) from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `folder/model.safetensors`."""
    path = folder / "model.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def read_provenance(folder: Path) -> dict[str, Any]:
    """What draftsmith noted when it wrote the folder; empty for a drafter of another trainer."""
    path = folder / PROVENANCE
    try:
        data = json.loads(path.read_text()) if path.is_file() else {}
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    return data if isinstance(data, dict) else {}


def remove_tree(folder: Path) -> None:
    """Deletes a folder with all that is in it; no error if it is not there."""
    if folder.is_dir():
        shutil.rmtree(folder)


def replace_folder(aside: Path, folder: Path) -> None:
    """Makes `aside` durable and puts it in the place of `folder`."""
    for item in [*aside.iterdir(), aside]:
        descriptor = os.open(item, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    old = folder.with_name(f".{folder.name}.old")
    remove_tree(old)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    remove_tree(old)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
