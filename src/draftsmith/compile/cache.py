"""The compiler's cache directory: who wrote what in it, how long that took, and what to do when it breaks.

PyTorch does not record who wrote an entry, so the guard appends a line per compilation to a journal in the directory.
Processes that share the directory take `<directory>.lock`: shared to compile, alone to set aside or clear.
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from draftsmith.compile import private
from draftsmith.compile.damage import (
    ENTRY_FOLDERS,
    files_below,
    find_damage,
    find_unreadable,
    foreign_paths,
    named_by,
)
from draftsmith.compile.journal import Stamp, append_stamps, read_stamps
from draftsmith.files import FileLock

LOCK_WAIT_S = 60.0
UNKNOWN = "unknown"

log = logging.getLogger("draftsmith.compile")
T = TypeVar("T")


class CacheError(RuntimeError):
    """The cache cannot be used as asked; the message says what to do."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A damaged directory, renamed."""

    directory: Path
    kept_as: Path
    evidence: tuple[str, ...]


class CompilerCache:
    """What this process does with its cache directory. Owned by the guard; used by the thread that compiles."""

    def __init__(self) -> None:
        self.set_aside: list[SetAside] = []
        self._examined: set[Path] = set()
        self._noted: set[str] = set()

    def run(self, compile_once: Callable[[], T]) -> T:
        """Runs a compilation; after damage once more, with the damaged directory set aside.

        The directory is examined before the process compiles for the first time, because loading a broken library
        can end the process, and when the compiler fails behind tracing. Other errors pass.
        """
        directory = private.cache_directory()
        if directory not in self._examined:
            self._examined.add(directory)
            if evidence := find_damage(directory):
                self._mend(directory, evidence, _identity(directory))
        seen: int | None = None
        try:
            with held(directory):
                seen = _identity(directory)
                return compile_once()
        except Exception as error:
            if not private.is_backend_error(error) or not self._mend_after(error, directory, seen):
                raise
        with held(directory):
            return compile_once()

    def note(self, name: str, signature: str, seconds: float, wrote: bool) -> None:
        """Writes the journal's line of a compilation, if it `wrote` to the cache."""
        keys = private.recorded_artifacts() - self._noted
        self._noted |= keys
        if wrote:
            stamp = Stamp(time.time(), torch.__version__, device_name(), name, signature, seconds, tuple(sorted(keys)))
            append_stamps(private.cache_directory(), [stamp])

    def _mend_after(self, error: Exception, directory: Path, seen: int | None) -> bool:
        """Is it worth another try, now that the cache is another one?"""
        if seen is not None and _identity(directory) != seen:  # another process has set it aside under us
            private.forget_loaded()
            return True
        evidence = find_damage(directory) or named_by(error, directory)
        return bool(evidence) and self._mend(directory, evidence, seen)

    def _mend(self, directory: Path, evidence: list[str], seen: int | None) -> bool:
        """Sets the directory aside, unless another process has done so since it was `seen`. False: it could not."""
        try:
            with held(directory, alone=True):
                now = _identity(directory)
                if now is not None and now == seen:
                    self._rename(directory, evidence)
        except (CacheError, OSError) as trouble:
            log.warning("the compiler cache is damaged (%s) and stays where it is: %s", _some(evidence), trouble)
            return False
        private.forget_loaded()
        return True

    def _rename(self, directory: Path, evidence: list[str]) -> None:
        if foreign := foreign_paths(directory):
            raise CacheError(f"not made by the compiler: {foreign[0]}; give the compiler a directory of its own")
        taken = {path.name for path in damaged_siblings(directory)}
        names = (f"{directory.name}{n or ''}" for n in (".damaged", *(f".damaged-{n}" for n in range(2, 10_000))))
        kept_as = directory.with_name(next(name for name in names if name not in taken))
        directory.rename(kept_as)
        self.set_aside.append(SetAside(directory, kept_as, tuple(evidence)))
        log.warning(
            "the compiler cache is damaged (%s): set aside as %s, and what is needed is compiled again",
            _some(evidence),
            kept_as,
        )


@contextmanager
def held(directory: Path, alone: bool = False) -> Iterator[None]:
    """The lock that processes share who use one cache directory.

    Raises:
        CacheError: others still compile after a minute, or there can be no lock. Only if asked to be `alone`: a
            compilation goes on without.
    """
    lock = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = _wait_for_lock(directory, alone)
    except (OSError, CacheError) as trouble:
        if alone:
            raise CacheError(str(trouble)) from trouble
        log.warning("compiling without the lock of the compiler cache: %s", trouble)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _wait_for_lock(directory: Path, alone: bool) -> FileLock:
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return FileLock(lock_file(directory), alone=alone)
        except BlockingIOError:
            if time.monotonic() > end:
                raise CacheError(f"another process uses {directory}; try again when it has ended") from None
        time.sleep(0.05)


def lock_file(directory: Path) -> Path:
    """Beside the directory, because the directory may be renamed."""
    return directory.with_name(f"{directory.name}.lock")


def damaged_siblings(directory: Path) -> list[Path]:
    """Directories that were set aside."""
    pattern = re.compile(re.escape(directory.name) + r"\.damaged(-\d+)?")
    beside = directory.parent.iterdir() if directory.parent.is_dir() else ()
    return sorted(path for path in beside if pattern.fullmatch(path.name))


def device_name() -> str:
    """What this machine compiles for."""
    cpu = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {cpu}"
    return cpu


def entries(directory: Path) -> dict[str, list[Path]]:
    """Files per compiled graph: `type/key`, as in a stamp. A graph that holds for several shapes has several."""
    found: dict[str, list[Path]] = {}
    for folder, kind in ENTRY_FOLDERS.items():
        for path in files_below(directory / folder):
            found.setdefault(f"{kind}/{path.parent.name}", []).append(path)
    return found


@dataclass(frozen=True, slots=True)
class Kind:
    """Files of one kind."""

    name: str
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Writer:
    """What one PyTorch on one kind of machine has left. `UNKNOWN` where no journal line says so."""

    torch: str
    device: str
    graphs: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that a signature took to compile when it was last compiled."""

    name: str
    signature: str
    torch: str
    device: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Survey:
    """A cache directory at a glance."""

    directory: Path
    kinds: tuple[Kind, ...]
    oldest_s: float | None  # since the epoch; None: empty
    newest_s: float | None
    writers: tuple[Writer, ...]
    costs: tuple[Cost, ...]
    damage: tuple[str, ...] = field(repr=False)
    unreadable: tuple[str, ...] = field(repr=False)
    set_aside: tuple[Path, ...]
    foreign: tuple[Path, ...] = ()  # not the compiler's

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(kind.nbytes for kind in self.kinds)

    @property
    def compile_s(self) -> float:
        """Seconds of compilation on record."""
        return sum(cost.seconds for cost in self.costs)


def survey(directory: Path) -> Survey:
    """Looks through a cache directory; one that does not exist is empty.

    Raises:
        CacheError: it is no directory, or this user may not read it.
    """
    require_directory(directory)
    sizes: dict[str, list[int]] = {}
    times = []
    for path in files_below(directory):
        try:
            status = path.lstat()
        except FileNotFoundError:  # cleared meanwhile
            continue
        sizes.setdefault(_kind(path.relative_to(directory)), []).append(status.st_size)
        times.append(status.st_mtime)
    stamps = read_stamps(directory)
    return Survey(
        directory=directory,
        kinds=tuple(Kind(name, len(sizes[name]), sum(sizes[name])) for name in sorted(sizes)),
        oldest_s=min(times, default=None),
        newest_s=max(times, default=None),
        writers=_writers(directory, stamps),
        costs=_costs(stamps),
        damage=tuple(find_damage(directory)),
        unreadable=tuple(find_unreadable(directory)),
        set_aside=tuple(damaged_siblings(directory)),
        foreign=tuple(foreign_paths(directory)),
    )


def require_directory(directory: Path) -> None:
    """Raises:
    CacheError: there is something else, or this user may not read it.
    """
    if directory.exists() and not directory.is_dir():
        raise CacheError(f"{directory} is not a directory; set TORCHINDUCTOR_CACHE_DIR to one")
    if directory.exists() and not os.access(directory, os.R_OK | os.X_OK):
        raise CacheError(f"{directory} cannot be read; give this user the right, or set TORCHINDUCTOR_CACHE_DIR")


def clear(directory: Path) -> None:
    """Deletes what the compiler has left, damaged directories that were set aside included. Other processes go on: what
    they have loaded stays loaded, and what they need next is compiled again.

    Raises:
        CacheError: another process compiles, or something there is not the compiler's. Then nothing is deleted.
    """
    with held(directory, alone=True):
        places = [directory, *damaged_siblings(directory)]
        found = {place: sorted(place.iterdir()) if place.is_dir() else [] for place in places}
        if foreign := [path for place in places for path in foreign_paths(place)]:
            names = ", ".join(map(str, foreign[:5]))
            raise CacheError(f"not made by the compiler: {names}; move it away, or delete the cache by hand")
        for place, paths in found.items():
            for path in paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if place != directory:
                place.rmdir()


def _kind(path: Path) -> str:
    named = {
        "fxgraph": "graph entries",
        "aotautograd": "autograd entries",
        "triton": "Triton kernels",
        "locks": "other",
    }
    suffixes = {
        ".py": "generated Python",
        ".so": "C++ libraries",
        ".cpp": "C++ sources",
        ".best_config": "tuning results",
    }
    return named.get(path.parts[0]) or suffixes.get(path.suffix, "other")


def _writers(directory: Path, stamps: list[Stamp]) -> tuple[Writer, ...]:
    wrote = {key: (stamp.torch, stamp.device) for stamp in reversed(stamps) for key in stamp.keys}  # the first one's
    graphs: dict[tuple[str, str], int] = {}
    for key in entries(directory):
        who = wrote.get(key, (UNKNOWN, UNKNOWN))
        graphs[who] = graphs.get(who, 0) + 1
    return tuple(Writer(*who, count) for who, count in sorted(graphs.items()))


def _costs(stamps: list[Stamp]) -> tuple[Cost, ...]:
    last = {(stamp.name, stamp.signature, stamp.torch, stamp.device): stamp.seconds for stamp in stamps}
    return tuple(Cost(*what, seconds) for what, seconds in last.items())


def _identity(directory: Path) -> int | None:
    try:
        return directory.stat().st_ino
    except FileNotFoundError:
        return None


def _some(evidence: list[str]) -> str:
    more = f" and {len(evidence) - 1} more" if len(evidence) > 1 else ""
    return f"{evidence[0]}{more}"
