"""Tensors in safetensors files: the library's files with the permissions and the errors of any other file."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors, as `format: pt` and more metadata if there is any.

    Raises:
        OSError: the disk is full, failed, or may not be written (the library has an error of its own for that).
    """
    path.touch()
    mode = path.stat().st_mode  # the library lets nobody but the owner read what it writes
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(own, path, {"format": "pt", **(metadata or {})})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    path.chmod(mode)


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A file to read tensors from.

    Raises:
        OSError: it cannot be opened, with the true reason (the library finds no file where there are no handles left).
        SafetensorError: it is damaged.
    """
    path.open("rb").close()
    with safe_open(path, "pt") as file:
        yield file
