"""What keeping the target's features takes, known before a byte is written, and the store that keeps them."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.config import Config
from draftsmith.data.template import Document
from draftsmith.decisions import Decision
from draftsmith.errors import InputError
from draftsmith.pipeline.machine import GIB, Machine
from draftsmith.pipeline.memory import MIB, MemoryItem
from draftsmith.pipeline.store import (
    SHARD_BYTES,
    DiskStore,
    FeatureStore,
    MemoryStore,
    NoStore,
    StoreIdentity,
    check_identity,
)

HEAD_BYTES = 128  # of a document in its shard's head: name, shape, place, checksum
USABLE = 0.95  # share of the host's memory that kept features may fill


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which features are kept, where, and how many. `documents` is 0 where they could not be counted."""

    mode: str
    folder: Path
    kept: torch.dtype
    received: torch.dtype  # by the drafter
    feature_size: int
    documents: int
    tokens: int

    @property
    def nbytes(self) -> int:
        """Size of all documents, in memory or as shards."""
        head = HEAD_BYTES * self.documents if self.mode == "disk" else 0
        return self.tokens * self.feature_size * self.kept.itemsize + head

    @property
    def formula(self) -> str:
        return f"{self.kept.itemsize} x {self.tokens:,} tokens x {self.feature_size:,}"

    @property
    def written_bytes(self) -> int:
        """What the folder holds already."""
        return sum(path.stat().st_size for path in self.folder.glob("shard-*.safetensors"))

    @property
    def free_bytes(self) -> int:
        """Room on the disk of the folder, or of where it will be made."""
        return shutil.disk_usage(next(p for p in (self.folder, *self.folder.absolute().parents) if p.is_dir())).free


def plan_keeping(config: Config, feature_size: int, received: torch.dtype, documents: Sequence[Document]) -> Keeping:
    """What the config asks to be kept of these documents' features, which the drafter gets as `received`."""
    kept = received if config.store.dtype == "target" else torch.bfloat16
    folder = Path(config.store.dir or Path(config.run.dir) / "features")
    tokens = sum(len(document.tokens_T) for document in documents) if config.features != "online" else 0
    return Keeping(config.features, folder, kept, received, feature_size, len(documents), tokens)


def choose_features(keeping: Keeping, *, here: bool = True) -> Decision:
    """Where features of later epochs come from, with the size it takes; `here`: on this machine's disk."""
    if keeping.mode == "online":
        return Decision("features", "online", "the target computes them in every epoch")
    if not keeping.documents:
        return Decision("features", keeping.mode, "size unknown: no documents were counted")
    value, reason = f"{keeping.mode}, {_size(keeping.nbytes)}", keeping.formula
    if keeping.kept != keeping.received:
        reason += f" in {_name(keeping.kept)}: rounded, so not equal to online"
    if keeping.mode == "disk":
        reason += f"; in {keeping.folder}"
        reason += f", {_size(keeping.written_bytes)} there, {_size(keeping.free_bytes)} free" if here else ""
    return Decision("features", value, reason)


def room_refusal(keeping: Keeping, machine: Machine) -> str | None:
    """Why the features do not fit on the machine's disk (if it is here) or into its memory, in one line."""
    smaller = "" if keeping.kept == torch.bfloat16 else "store.dtype=bfloat16, "
    if keeping.mode == "disk" and machine.here:
        need, room = keeping.nbytes - keeping.written_bytes, keeping.free_bytes
        if need > room:
            return (
                f"store.dir {keeping.folder} has {_size(room)} free, the features need {_size(need)} more "
                f"({keeping.formula}); use {smaller}another store.dir, or features=online"
            )
    if keeping.mode == "memory" and keeping.nbytes > USABLE * machine.host_bytes:
        return (
            f"features: memory needs {_size(keeping.nbytes)} ({keeping.formula}), this host has "
            f"{_size(machine.host_bytes)}; use {smaller}features=disk, or features=online"
        )
    return None


def check_keeping(keeping: Keeping, identity: StoreIdentity, machine: Machine) -> None:
    """Called before anything is written.

    Raises:
        InputError: the features would not fit, or the folder holds other features.
    """
    if refusal := room_refusal(keeping, machine):
        raise InputError(refusal)
    if keeping.mode == "disk":
        check_identity(keeping.folder, identity)


def kept_memory(keeping: Keeping, target_workers: int) -> MemoryItem | None:
    """What the store keeps in host memory: everything, or the shards that are not on disk yet."""
    if keeping.mode == "memory":
        return MemoryItem("kept features", "host", keeping.nbytes, keeping.formula)
    if keeping.mode == "disk":
        nbytes = (target_workers + 1) * SHARD_BYTES
        how = f"({target_workers} target workers + 1) x {SHARD_BYTES // MIB} MiB"
        if keeping.documents and keeping.nbytes < nbytes:
            nbytes, how = keeping.nbytes, keeping.formula
        return MemoryItem("feature shards to write", "host", nbytes, how)
    return None


def open_store(keeping: Keeping, identity: StoreIdentity, say: Callable[[str], None]) -> FeatureStore:
    """The store of a run.

    Raises:
        InputError: the folder is another store, or cannot be used.
    """
    if keeping.mode == "memory":
        return MemoryStore(keeping.kept, keeping.received)
    if keeping.mode == "disk":
        return DiskStore(keeping.folder, identity, keeping.documents, keeping.kept, keeping.received, say)
    return NoStore()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"
