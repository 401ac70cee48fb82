"""Who wrote what in the compiler's cache directory: a line per compilation, in a file beside the entries."""

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.compile.damage import JOURNAL, read_whole

log = logging.getLogger("draftsmith.compile")


@dataclass(frozen=True, slots=True)
class Stamp:
    """A line of the journal: a compilation that wrote cache entries."""

    when_s: float  # since the epoch
    torch: str
    device: str  # of the machine
    name: str  # of the function
    signature: str
    seconds: float
    keys: tuple[str, ...]  # of the entries that it was the first to write: "inductor/...", "aot_autograd/..."


def append_stamps(directory: Path, stamps: list[Stamp]) -> None:
    """One write, so that lines of several processes do not mix. A directory that cannot be written loses them, said."""
    lines = "".join(json.dumps(asdict(stamp)) + "\n" for stamp in stamps)
    try:
        file = os.open(directory / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, lines.encode())
        finally:
            os.close(file)
    except OSError as error:
        log.warning("the journal of the compiler cache cannot be written: %s", error)


def read_stamps(directory: Path) -> list[Stamp]:
    """The journal, oldest line first. Lines that cannot be read are said and left out."""
    path = directory / JOURNAL
    try:
        lines = read_whole(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("the journal of the compiler cache cannot be read: %s", error)
        return []
    stamps, bad = [], 0
    for line in lines:
        try:
            stamps.append(parse_stamp(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            bad += 1
    if bad:
        log.warning("%s: %d lines cannot be read and are left out", path, bad)
    return stamps


def parse_stamp(values: Any) -> Stamp:
    """A line of a journal.

    Raises:
        TypeError, KeyError: it is none.
    """
    stamp = Stamp(**(values | {"keys": tuple(values["keys"])}))
    words = (stamp.torch, stamp.device, stamp.name, stamp.signature, *stamp.keys)
    numbers = (stamp.when_s, stamp.seconds)
    if not all(isinstance(word, str) for word in words) or not all(isinstance(n, int | float) for n in numbers):
        raise TypeError("fields of other types")
    return stamp
