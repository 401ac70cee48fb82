"""Target features kept for later epochs: in memory, or on disk as safetensors shards that several processes may read.

Features are kept per document, by its number in the corpus. So a store depends on the target, its taps and the
documents, and on nothing else of a run: runs with other seeds, drafters or learning rates can share one.
"""

import errno
import json
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from draftsmith.errors import ConfigError, InputError, explained
from draftsmith.files import LOCK, FileLock, file_aside, is_damage, recover, recover_all, write_text
from draftsmith.tensors import open_tensors, save_tensors

SHARD_BYTES = 256 * 2**20  # of features in one file
_NOTE = "store.json"


class FeatureStore(Protocol):
    """Where target workers look before they compute. All methods may be called by several threads at once."""

    def get(self, documents: Sequence[int]) -> list[Tensor] | None:
        """Features [T_i, F] of all these documents, or None if one of them is missing: a target call is repeated as
        a whole, so that its bits are those of the first time."""
        ...

    def put(self, documents: Sequence[int], hidden: Sequence[Tensor]) -> list[Tensor]:
        """Keeps features [T_i, F] that were just computed. Returns them as `get` will give them from now on."""
        ...

    def close(self) -> None:
        """The run has ended well: what is not on disk yet is written."""
        ...

    @property
    def summary(self) -> str:
        """A line for the log; empty if there is nothing to say."""
        ...


class NoStore:
    """`features: online`: every epoch asks the target again."""

    def get(self, documents: Sequence[int]) -> list[Tensor] | None:
        return None

    def put(self, documents: Sequence[int], hidden: Sequence[Tensor]) -> list[Tensor]:
        return list(hidden)

    def close(self) -> None:
        pass

    @property
    def summary(self) -> str:
        return ""


class MemoryStore:
    """`features: memory`: in host memory, gone when the process ends."""

    def __init__(self, kept: torch.dtype, received: torch.dtype) -> None:
        """`kept` is the dtype in the store, `received` the one that the drafter gets."""
        self._kept, self._received = kept, received
        self._hidden: dict[int, Tensor] = {}

    def get(self, documents: Sequence[int]) -> list[Tensor] | None:
        try:
            return [self._hidden[number].to(self._received) for number in documents]
        except KeyError:
            return None

    def put(self, documents: Sequence[int], hidden: Sequence[Tensor]) -> list[Tensor]:
        rounded = [h.to(self._kept) for h in hidden]
        self._hidden.update(zip(documents, map(_host_copy, rounded), strict=True))
        return [h.to(self._received) for h in rounded]

    def close(self) -> None:
        pass

    @property
    def summary(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What the features in a folder follow from. Two runs can share a folder if these agree."""

    target: str  # fingerprint
    taps: tuple[int, ...]
    dtype: str
    documents: str  # fingerprint


class DiskStore:
    """`features: disk`: shards in a folder, each a safetensors file with a CRC-32 of every document in its metadata.

    Owner: the run. One lock guards the index and what is not written yet; files are read and written outside it.
    Guarantees:

    - One process writes: the one that holds the folder's kernel lock. Others, and those that may not write there, read
      and compute what is missing. If all documents are there, nobody holds the lock.
    - A shard appears whole or not at all, so a killed run loses at most the shards that were not full, and computes
      those documents again.
    - Every document is checked when it is read. A damaged shard is said, set aside (`.damaged`) and computed again.
    - At most (threads + 1) shards wait in memory: the thread that fills one writes it.
    - A shard that cannot be written (a full disk) is given up, said, and its documents are computed again when they are
      next asked for; the next shard is tried again. Training goes on, and memory stays bounded.
    """

    def __init__(
        self,
        folder: Path,
        identity: StoreIdentity,
        count: int,
        kept: torch.dtype,
        received: torch.dtype,
        say: Callable[[str], None],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Opens the folder, or makes it.

        Args:
            folder: holds one store and nothing else.
            identity: must be that of the folder.
            count: all documents, numbered from 0.
            kept, received: dtype in the files, and the one that the drafter gets.
            say: receives a line about damage.
            shard_bytes: features of a shard that is full.

        Raises:
            ConfigError: the folder holds features of something else.
            InputError: it cannot be read or made.
        """
        self.folder, self._count, self._kept, self._received = folder, count, kept, received
        self._say, self._shard_bytes = say, shard_bytes
        self._lock = threading.Lock()
        self._shards: dict[int, Path] = {}  # where each document lies
        self._waiting: dict[int, Tensor] = {}  # not on disk yet, those of the open shard among them
        self._open: dict[int, Tensor] = {}
        check_identity(folder, identity)
        self._said: set[str] = set()
        self._unwritten = 0  # documents given up since writing last worked
        self._writer = _locked(folder)
        if self._writer:
            recover_all(folder, "shard-*")
            recover(folder / _NOTE)
        self._index()
        numbers = [path.name[6:12] for path in folder.glob("shard-*")]
        self._next = 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)
        if len(self._shards) == count:
            self._release()
        elif self._writer and not (folder / _NOTE).exists():
            _write_note(folder, identity)

    @property
    def summary(self) -> str:
        with self._lock:
            there = f"features: {len(self._shards)} of {self._count} documents in {self.folder}"
        if len(self._shards) == self._count:
            return f"{there}, all of them: the target computes none"
        return f"{there}; " + (
            "the others are added" if self._writer else "another process writes, this one only reads"
        )

    def get(self, documents: Sequence[int]) -> list[Tensor] | None:
        with self._lock:
            found = {number: self._waiting[number] for number in documents if number in self._waiting}
            written = {n: self._shards[n] for n in documents if n not in found and n in self._shards}
        if len(found) + len(written) < len(set(documents)):
            return None
        for path in set(written.values()):
            try:
                found |= _read_shard(path, [number for number, at in written.items() if at == path])
            except _DAMAGE as error:
                if is_damage(error):
                    self._forget(path, error)
                else:
                    self._say_once(f"features: {explained(error) or error}; its documents are computed meanwhile")
                return None
        return [found[number].to(self._received) for number in documents]

    def put(self, documents: Sequence[int], hidden: Sequence[Tensor]) -> list[Tensor]:
        rounded = [h.to(self._kept) for h in hidden]
        if self._writer:
            copies = dict(zip(documents, map(_host_copy, rounded), strict=True))
            with self._lock:
                new = {n: h for n, h in copies.items() if n not in self._shards and n not in self._waiting}
                self._waiting |= new
                self._open |= new
                full = sum(h.nbytes for h in self._open.values()) >= self._shard_bytes
                shard = self._take_open() if full else None
            if shard:
                self._write(*shard)
        return [h.to(self._received) for h in rounded]

    def close(self) -> None:
        with self._lock:
            shard = self._take_open() if self._open else None
        if shard:
            self._write(*shard)
        self._release()

    def _take_open(self) -> tuple[Path, dict[int, Tensor]]:
        """The open shard, to be written, and the name it gets."""
        path, shard = self.folder / f"shard-{self._next:06}.safetensors", self._open
        self._next, self._open = self._next + 1, {}
        return path, shard

    def _write(self, path: Path, shard: Mapping[int, Tensor]) -> None:
        sums = {str(number): _crc(hidden) for number, hidden in shard.items()}
        try:
            with file_aside(path) as aside:
                save_tensors({str(n): h for n, h in shard.items()}, aside, {"crc32": json.dumps(sums)})
        except OSError as error:
            self._give_up(shard, error)
            return
        with self._lock:
            for number in shard:
                self._shards[number] = path
                del self._waiting[number]
            again, self._unwritten = self._unwritten > 0, 0
        if again:
            self._say(f"features: {self.folder} can be written again")

    def _give_up(self, shard: Mapping[int, Tensor], error: OSError) -> None:
        with self._lock:
            for number in shard:
                del self._waiting[number]
            first, self._unwritten = self._unwritten == 0, self._unwritten + len(shard)
        if first:
            self._say(
                f"warning: features of {len(shard)} documents are not kept: {explained(error) or error}; training goes "
                "on, the target computes them again, and the next shard is tried"
            )

    def _index(self) -> None:
        """Notes which documents are there, from the heads of the shards."""
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            try:
                with open_tensors(path) as file:
                    self._shards |= dict.fromkeys(map(int, file.keys()), path)
            except _DAMAGE as error:
                if not is_damage(error):
                    raise
                self._set_aside(path, error)

    def _forget(self, path: Path, error: Exception) -> None:
        """A shard turned out to be damaged; of several threads that see it, the first one acts."""
        with self._lock:
            known = [number for number, at in self._shards.items() if at == path]
            for number in known:
                del self._shards[number]
            if known:
                self._writer = self._writer or _locked(self.folder)
                self._set_aside(path, error)

    def _set_aside(self, path: Path, error: Exception) -> None:
        if self._writer and path.exists():
            path.rename(path.with_name(f"{path.name}.damaged"))
        self._say(f"features: {path} is damaged ({error}); its documents are computed again")

    def _say_once(self, line: str) -> None:
        with self._lock:
            new = line not in self._said
            self._said.add(line)
        if new:
            self._say(line)

    def _release(self) -> None:
        if self._writer:
            self._writer.release()
        self._writer = None


_DAMAGE = (OSError, SafetensorError, ValueError, KeyError, TypeError)


def check_identity(folder: Path, identity: StoreIdentity) -> None:
    """A folder that is a store must be one of the same features.

    Raises:
        ConfigError: it is not; says in what it differs.
        InputError: its note cannot be read.
    """
    note = folder / _NOTE
    if not note.exists():
        if any(folder.glob("shard-*.safetensors")):
            raise ConfigError(f"store.dir {folder} holds shards but no {_NOTE}, so nobody knows of what; set another")
        return
    try:
        found = json.loads(note.read_text())
        differing = [key for key, value in asdict(identity).items() if found[key] != _plain(value)]
    except _DAMAGE as error:
        if not is_damage(error):
            raise
        raise InputError(
            f"store.dir: {note} cannot be read ({error}); remove {folder} or set another store.dir"
        ) from None
    if differing:
        raise ConfigError(
            f"store.dir {folder} holds features of other {' and '.join(differing)}; set another store.dir, or remove it"
        )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _write_note(folder: Path, identity: StoreIdentity) -> None:
    write_text(folder / _NOTE, [json.dumps(asdict(identity), indent=2) + "\n"])


def _locked(folder: Path) -> FileLock | None:
    """The folder's lock; None if another process holds it, or this one may not write there.

    Raises:
        InputError: there is no such folder and it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"store.dir {folder} cannot be made: {error.strerror}; set another") from None
    try:
        return FileLock(folder / LOCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK):
            return None
        raise


def _read_shard(path: Path, numbers: Sequence[int]) -> dict[int, Tensor]:
    """Documents of a shard, each checked."""
    found = {}
    with open_tensors(path) as file:
        sums = json.loads(file.metadata()["crc32"])
        for number in numbers:
            found[number] = file.get_tensor(str(number))
            if _crc(found[number]) != sums[str(number)]:
                raise ValueError(f"document {number} does not match its checksum")
    return found


def _crc(hidden_TF: Tensor) -> int:
    data: NDArray[np.uint8] = hidden_TF.view(torch.uint8).numpy()
    return zlib.crc32(data.data)


def _host_copy(hidden_TF: Tensor) -> Tensor:
    """A copy of its own, in host memory."""
    return torch.empty_like(hidden_TF, device="cpu", memory_format=torch.contiguous_format).copy_(hidden_TF)
