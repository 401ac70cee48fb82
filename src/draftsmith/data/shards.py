"""Prepared data on disk: Arrow files with one document per row, read through memory maps.

A shard holds what became of one chunk of one input file, its rejects and counts included, so it needs no other file to
be understood. Its name carries a hash of everything it was made from: a shard that is there need not be made again.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from draftsmith.data.conversations import Reject
from draftsmith.data.hub import MANIFEST, SHARDS
from draftsmith.data.rendered import Rendered
from draftsmith.data.template import Document
from draftsmith.errors import InputError
from draftsmith.files import file_aside, file_hash, is_inside

FORMAT = "draftsmith data 1"
REJECTS, CONTAMINATION = "rejects.jsonl", "contamination.jsonl"
SCHEMA = pa.schema(
    [
        ("line", pa.int64()),
        ("content_hash", pa.binary(32)),
        ("chat", pa.bool_()),
        ("prompt_tokens", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
    ]
)


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """What a shard holds. `lengths` counts documents by the power of two that their tokens reach."""

    file: str
    kept: int
    rejected: int
    documents: int
    tokens: int
    supervised: int
    lengths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Contained:
    """An evaluation prompt that the conversation of a line contains; `dropped`: it became a reject for that."""

    line: int
    prompt: str
    overlap: float
    dropped: bool


def write_shard(
    path: Path, file: str, items: Sequence[Rendered | Reject], contains: Sequence[Contained] = ()
) -> ShardCounts:
    """Writes a shard in one step: it is there whole or not at all."""
    rendered = [item for item in items if isinstance(item, Rendered)]
    rejects = [{"line": item.line, "reason": item.reason} for item in items if isinstance(item, Reject)]
    rows = [(item, document) for item in rendered for document in item.documents]
    about = {"rejects": rejects, "contains": [asdict(entry) for entry in contains]}
    counts = _count(file, len(rendered), len(rejects), [document for _, document in rows])
    table = pa.record_batch(
        [
            pa.array([item.line for item, _ in rows], pa.int64()),
            pa.array([bytes.fromhex(item.content_hash) for item, _ in rows], pa.binary(32)),
            pa.array([item.chat for item, _ in rows], pa.bool_()),
            pa.array([document.prompt_tokens for _, document in rows], pa.int32()),
            _ragged([document.tokens_T for _, document in rows], np.int32),
            _ragged([document.supervised_T for _, document in rows], np.uint8),
        ],
        schema=SCHEMA.with_metadata({"draftsmith": json.dumps({**asdict(counts), **about})}),
    )
    with file_aside(path) as aside, pa.ipc.new_file(str(aside), table.schema) as writer:
        writer.write_batch(table)
    return counts


def _ragged(values: Sequence[NDArray[Any]], dtype: Any) -> pa.ListArray:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    joined = np.concatenate([*values, np.zeros(0, dtype)]).astype(dtype, copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(joined))


def _count(file: str, kept: int, rejected: int, documents: Sequence[Document]) -> ShardCounts:
    lengths = Counter(1 << (len(document.tokens_T) - 1).bit_length() for document in documents)
    return ShardCounts(
        file=file,
        kept=kept,
        rejected=rejected,
        documents=len(documents),
        tokens=sum(len(document.tokens_T) for document in documents),
        supervised=sum(int(document.supervised_T.sum()) for document in documents),
        lengths={str(length): lengths[length] for length in sorted(lengths)},
    )


class Shard:
    """A shard that is there. Its columns are views of the mapped file; nothing is copied.

    Raises:
        InputError: it is no whole shard.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
            self.batch.validate(full=True)  # offsets come from the file as they are
            self.about: dict[str, Any] = json.loads(self.batch.schema.metadata[b"draftsmith"])
            self.counts = ShardCounts(**{name: self.about[name] for name in ShardCounts.__slots__})
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is damaged: {error}; run `draftsmith data prepare` again") from error

    @property
    def rejects(self) -> list[Reject]:
        return [Reject(self.about["file"], reject["line"], reject["reason"]) for reject in self.about["rejects"]]

    @property
    def contains(self) -> list[Contained]:
        return [Contained(**entry) for entry in self.about["contains"]]

    def items(self) -> Iterator[Rendered | Reject]:
        """Conversations and rejects by line."""
        rejects = self.rejects[::-1]
        for item in self._rendered():
            while rejects and rejects[-1].line < item.line:
                yield rejects.pop()
            yield item
        yield from rejects[::-1]

    def _rendered(self) -> Iterator[Rendered]:
        lines = self.column("line")
        documents = list(self._documents())
        hashes, chats = self.batch.column("content_hash"), self.batch.column("chat")
        starts = conversation_starts(lines)
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
            inside = tuple(documents[start:stop])
            yield Rendered(
                self.about["file"], int(lines[start]), hashes[start].as_py().hex(), chats[start].as_py(), inside
            )

    def _documents(self) -> Iterator[Document]:
        ids, masks = self.batch.column("input_ids"), self.batch.column("loss_mask")
        tokens, offsets = ids.values.to_numpy(), ids.offsets.to_numpy()
        supervised = masks.values.to_numpy().view(np.bool_)
        for start, stop, prompt in zip(offsets[:-1], offsets[1:], self.column("prompt_tokens"), strict=True):
            yield Document(tokens[start:stop], supervised[start:stop], int(prompt))

    def column(self, name: str) -> NDArray[Any]:
        """A column of numbers."""
        return self.batch.column(name).to_numpy()  # type: ignore[no-any-return]


def conversation_starts(lines: NDArray[np.int64]) -> list[int]:
    """Rows that begin a conversation: documents of one conversation stand together and share its line."""
    return np.flatnonzero(np.diff(lines, prepend=-1)).tolist()


def read_manifest(folder: Path, name: str = MANIFEST) -> dict[str, Any]:
    """What a prepared folder says about itself, or, in `UNFINISHED`, one that is being made.

    Raises:
        InputError: it cannot be read.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or "format" not in manifest:
            raise ValueError("it does not say its format")
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, this draftsmith reads {FORMAT!r}")
        if name == MANIFEST or "shards" in manifest:
            _check_entries(manifest)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder}/{name} cannot be used: {error}; delete {folder} and run `draftsmith data prepare` again"
        ) from error
    return manifest


def _check_entries(manifest: Mapping[str, Any]) -> None:
    entries = manifest.get("shards")
    if not isinstance(entries, list):
        raise ValueError("shards is no list")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "sha256")):
            raise ValueError(f"shards[{number}] has no name and sha256")
        if not is_inside(entry["name"]):
            raise ValueError(f"shards[{number}] is {entry['name']!r}, which is not inside the folder")
    missing = [key for key in ("rendering_key", "template_settings") if key not in manifest]
    if missing:
        raise ValueError(f"it has no {missing[0]}")


def read_prepared(folder: Path, key: str) -> Iterator[Rendered | Reject]:
    """Everything in a prepared folder, in the order of the input, as reading the input would give it.

    Args:
        key: hash of the tokenizer, template and settings that are to be used now.

    Raises:
        InputError: it was prepared with others, or a shard is damaged.
    """
    manifest = read_manifest(folder)
    if manifest["rendering_key"] != key:
        raise InputError(
            f"data.train: {folder} was prepared with another tokenizer, chat template or template settings "
            f"({json.dumps(manifest['template_settings'])}); prepare it again for this target, or set data.* to match"
        )
    for entry in manifest["shards"]:
        path = folder / SHARDS / entry["name"]
        if not path.is_file() or file_hash(path) != entry["sha256"]:
            raise InputError(f"data.train: {path} is missing or damaged; run `draftsmith data prepare` again")
        yield from Shard(path).items()
