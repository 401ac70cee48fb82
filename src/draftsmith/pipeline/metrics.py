"""`metrics.jsonl` and its like: lines about steps, each once, in order, and whole."""

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.errors import written_below


class StepLog:
    """A file of JSON lines that each have a `step`; it is made when the first is written.

    Owner: one thread. A line that cannot be written waits and is written before the next one. A killed or failing
    write leaves at most the end of the file cut off, and the next one begins there anew."""

    def __init__(self, path: Path, step: int) -> None:
        """Cuts the file after the lines up to `step`, if there is one."""
        self._path = path
        self._waiting: list[bytes] = []
        self._size = cut_lines(path, step)
        self._file: io.FileIO | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Takes a line; `write` puts it into the file."""
        self._waiting.append(json.dumps(line).encode() + b"\n")

    def write(self) -> None:
        """Writes what waits.

        Raises:
            OSError: not all of it could be written; the file ends with a whole line, and all of it still waits.
        """
        data, done = b"".join(self._waiting), 0
        if not data:
            return
        with written_below(self._path):
            self._file = self._file or self._path.open("r+b" if self._path.exists() else "xb", buffering=0)
        try:
            with written_below(self._path):
                while done < len(data):  # a disk that fills up takes a part
                    done += os.pwrite(self._file.fileno(), data[done:], self._size + done)
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += done
        self._waiting.clear()

    def sync(self) -> None:
        """Makes the lines durable."""
        if self._file:
            with written_below(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file:
            self._file.close()


def cut_lines(path: Path, step: int) -> int:
    """Keeps the lines up to `step`, byte for byte; later ones belong to steps that will be taken again. Returns the
    bytes kept."""
    if not path.exists():
        return 0
    kept = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or (_step_of(line) or 0) > step:
                break
            kept += len(line)
    with path.open("rb+") as file:
        file.truncate(kept)
    return kept


def _step_of(line: bytes) -> float | None:
    """None for a line that somebody has damaged: it is kept like its neighbours."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
