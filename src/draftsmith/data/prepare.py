"""`draftsmith data prepare`: files to shards of token ids and loss masks, in parallel, resumable, in bounded memory.

The input is cut into chunks by content alone; a worker process turns a chunk into a shard whose name is a hash of all
it was made from. So there is no state to resume: chunks whose shard is there and whole are skipped. Whatever order the
workers finish in, and however often a run was killed, the folder ends up the same byte for byte.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.crew import Alone, Crew, Work
from draftsmith.data.hub import MANIFEST, SHARDS, UNFINISHED
from draftsmith.data.shards import (
    CONTAMINATION,
    FORMAT,
    REJECTS,
    Shard,
    ShardCounts,
    conversation_starts,
    read_manifest,
)
from draftsmith.data.sources import Chunk, Source, read_chunks
from draftsmith.errors import ConfigError, InputError
from draftsmith.files import LOCK, file_hash, lock_folder, recover, remove, write_text

HASHES_AT_ONCE = 2**23  # 64 MiB: duplicates are counted in as many passes as that takes


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preparation is."""

    read_bytes: int
    total_bytes: int
    kept: int
    rejected: int
    reused: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a finished folder holds. `contaminated` conversations contain `prompts_found` evaluation prompts; `reused`
    of its `shards` were there before."""

    kept: int
    rejected: int
    documents: int
    tokens: int
    supervised: int
    duplicates: int
    contaminated: int
    prompts_found: int
    lengths: dict[str, int]
    shards: int
    reused: int


class Preparer:
    """One preparation into one folder.

    A chunk per worker is under way, one more is read ahead, and what comes back is counts.
    """

    def __init__(self, sources: Sequence[Source], work: Work, out: Path, processes: int) -> None:
        self._sources, self._work, self._out, self._processes = sources, work, out, processes
        self._total_bytes = sum(source.path.stat().st_size for source in sources)
        self._names: dict[int, str] = {}  # of the shards, by chunk
        self._counts: dict[int, ShardCounts] = {}
        self._hashes: dict[str, str] = {}  # of the shards that a finished folder had, by name
        self._reused = 0

    def run(self, stop: threading.Event, progress: Callable[[Progress], None]) -> Prepared | None:
        """Makes all shards that are missing, then the manifest. None if it was stopped.

        Raises:
            ConfigError: the folder holds something else.
            InputError: a file cannot be read, or a worker died.
        """
        with lock_folder(self._out, "--out"):
            self._check_folder()
            (self._out / SHARDS).mkdir(exist_ok=True)
            crew = Alone(self._work) if self._processes == 1 else Crew(self._work, self._processes)
            try:
                finished = self._make_shards(crew, stop, progress)
            finally:
                crew.close()
            return self._finish() if finished else None

    def _check_folder(self) -> None:
        """The folder is empty, or was begun by the same command."""
        about = self._about()
        path = self._out / UNFINISHED
        recover(path)
        inside = {entry.name for entry in self._out.iterdir()} - {LOCK}
        if path.is_file() or MANIFEST in inside:
            before = read_manifest(self._out, MANIFEST if MANIFEST in inside else UNFINISHED)
            self._hashes = {entry["name"]: entry["sha256"] for entry in before.get("shards", [])}
            differing = [name for name, value in about.items() if before.get(name) != value]
            if differing:
                raise ConfigError(
                    f"--out {self._out} holds data prepared with other {', '.join(differing)}; choose another folder"
                )
        elif inside:
            raise ConfigError(f"--out {self._out} is not empty and no prepared data; choose another folder")
        else:
            write_text(path, [json.dumps(about)])

    def _about(self) -> dict[str, Any]:
        """What makes a folder another folder: not the content of the files, which may grow."""
        return {
            "format": FORMAT,
            "rendering_key": self._work.renderer.key,
            "template_settings": self._work.renderer.settings.to_json(),
            "evaluation_prompts": self._work.prompts.key if self._work.prompts else None,
            "drop_contaminated": self._work.drop,
            "files": [source.name for source in self._sources],
        }

    def _make_shards(self, crew: Alone | Crew, stop: threading.Event, progress: Callable[[Progress], None]) -> bool:
        for number, (chunk, read_bytes) in enumerate(self._chunks()):
            name = f"{number:06}-{self._chunk_key(chunk)[:16]}.arrow"
            self._names[number] = name
            path = self._out / SHARDS / name
            there = self._counts_of(path)
            if there is not None:
                self._counts[number] = there
                self._reused += 1
            else:
                self._counts.update(crew.make(number, chunk, path))
            progress(self._progress(read_bytes))
            if stop.is_set():
                return False
        self._counts.update(crew.finish())
        progress(self._progress(self._total_bytes))
        return not stop.is_set()

    def _counts_of(self, path: Path) -> ShardCounts | None:
        """What a shard that was there before holds. None if it has to be made: there is none, or it is damaged."""
        if not path.is_file():
            return None
        if path.name in self._hashes and file_hash(path) != self._hashes[path.name]:
            return None
        try:
            return Shard(path).counts
        except InputError:
            return None

    def _chunks(self) -> Iterator[tuple[Chunk, int]]:
        """All chunks with the bytes of all files up to their end."""
        before = 0
        for source in self._sources:
            for chunk in read_chunks(source):
                yield chunk, before + chunk.read_bytes
            before += source.path.stat().st_size

    def _chunk_key(self, chunk: Chunk) -> str:
        """Hash of everything a shard is made from."""
        source, lines = chunk.source, [line for line, _ in chunk.records]
        head = [FORMAT, self._work.key, source.name, source.form, source.strict]
        digest = sha256(json.dumps(head).encode())
        digest.update(np.array([lines, [len(raw) for _, raw in chunk.records]], np.int64).tobytes())
        digest.update(b"".join(raw for _, raw in chunk.records))
        return digest.hexdigest()

    def _progress(self, read_bytes: int) -> Progress:
        counts = self._counts.values()
        return Progress(
            read_bytes,
            self._total_bytes,
            sum(count.kept for count in counts),
            sum(count.rejected for count in counts),
            self._reused,
        )

    def _finish(self) -> Prepared:
        """Rejects, summary and manifest; shards that no chunk has any more are removed."""
        names = [self._names[number] for number in sorted(self._names)]
        folder = self._out / SHARDS
        paths = [folder / name for name in names]
        write_text(self._out / REJECTS, _reject_lines(paths))
        if self._work.prompts is not None:
            write_text(self._out / CONTAMINATION, _contamination_lines(paths))
        counts = [self._counts[number] for number in sorted(self._counts)]
        lengths: Counter[int] = Counter()
        for count in counts:
            lengths.update({int(length): number for length, number in count.lengths.items()})
        result = Prepared(
            kept=sum(c.kept for c in counts),
            rejected=sum(c.rejected for c in counts),
            documents=sum(c.documents for c in counts),
            tokens=sum(c.tokens for c in counts),
            supervised=sum(c.supervised for c in counts),
            duplicates=count_duplicates(paths),
            contaminated=sum(len({entry.line for entry in Shard(path).contains}) for path in paths),
            prompts_found=len({entry.prompt for path in paths for entry in Shard(path).contains}),
            lengths={str(length): lengths[length] for length in sorted(lengths)},
            shards=len(names),
            reused=self._reused,
        )
        entries = [{"name": path.name, "sha256": file_hash(path), "bytes": path.stat().st_size} for path in paths]
        summary = {name: value for name, value in asdict(result).items() if name != "reused"}
        manifest = self._about() | {"summary": summary, "shards": entries}
        write_text(self._out / MANIFEST, [json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"])
        for path in set(folder.iterdir()) - set(paths):
            remove(path)
        (self._out / UNFINISHED).unlink(missing_ok=True)
        return result


def _reject_lines(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        for reject in Shard(path).rejects:
            yield reject.to_json() + "\n"


def _contamination_lines(paths: Sequence[Path]) -> Iterator[str]:
    for shard in map(Shard, paths):
        for entry in shard.contains:
            yield json.dumps({"file": shard.counts.file, **asdict(entry)}, ensure_ascii=False) + "\n"


def count_duplicates(paths: Sequence[Path], at_once: int = HASHES_AT_ONCE) -> int:
    """Conversations whose content stood in the data before, by 64 bits of their hash.

    Only hashes of one residue are in memory at a time, so that memory does not grow with the data.
    """
    total = sum(Shard(path).counts.kept for path in paths)
    passes = max(1, -(-total // at_once))
    unique = 0
    for residue in range(passes):
        parts = [_hashes(path) for path in paths] if passes == 1 else [
            hashes[hashes % np.uint64(passes) == residue] for hashes in map(_hashes, paths)
        ]  # fmt: skip
        unique += len(np.unique(np.concatenate(parts))) if parts else 0
    return total - unique


def _hashes(path: Path) -> Any:
    shard = Shard(path)
    words = np.frombuffer(shard.batch.column("content_hash").buffers()[1], np.uint64).reshape(-1, 4)
    return words[conversation_starts(shard.column("line")), 0]
