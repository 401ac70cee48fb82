"""Files of records, read as a stream: JSON lines, JSON values, Parquet and Arrow tables, plain or gzipped.

A source yields chunks whose borders depend on the file's content alone, so that whoever works on a chunk, and whenever,
does the same work. Memory is bounded by a chunk and the longest record.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from draftsmith.data.forms import FORMS, MAX_RECORD_BYTES, Malformed, detect, parsed
from draftsmith.decisions import Decision
from draftsmith.errors import ConfigError, InputError

CHUNK_RECORDS, CHUNK_BYTES = 4096, 4 * 2**20
BLOCK_BYTES = 2**20
LOOK_AT = 100  # records that are looked at to find a file's form
TABLE_ROWS = 512  # rows of a table that are Python objects at a time
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
BOM = b"\xef\xbb\xbf"

Record = tuple[int, bytes]  # where it stands (line or row, from 1) and its JSON


@dataclass(frozen=True, slots=True)
class Source:
    """A file and how it is read. `name` is what a person called it; `strict`: the form was asked for."""

    name: str
    path: Path
    container: str  # lines, values, parquet, arrow
    form: str
    strict: bool
    reason: str

    @property
    def decision(self) -> Decision:
        return Decision(f"form of {self.name}", f"{self.form} in {self.container}", self.reason)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring records of one file. `read_bytes`: how far into the file they reach."""

    source: Source
    records: tuple[Record, ...]
    read_bytes: int


def open_source(name: str, path: Path, form: str | None = None, key: str = "data.train") -> Source:
    """Looks at a file's first records to decide how it is read.

    Raises:
        ConfigError: there is no form of that name.
        InputError: the file cannot be read.
    """
    if form is not None and form not in FORMS:
        raise ConfigError(f"data.form is {form!r}; known forms are {', '.join(FORMS)}")
    with _reported(path, key):
        container = TABLES.get(path.suffix) or _text_container(path)
        if form is not None:
            return Source(name, path, container, form, True, "asked for")
        for line, raw in islice(_records(path, container), LOOK_AT):
            try:
                found = detect(parsed(raw))
            except Malformed:
                continue
            if found:
                where = "row" if path.suffix in TABLES else "line"
                return Source(name, path, container, found, False, f"the keys in {where} {line}")
    return Source(name, path, container, "messages", False, f"no known form among its first {LOOK_AT} records")


def read_chunks(source: Source, key: str = "data.train") -> Iterator[Chunk]:
    """All records of a file, none of them blank, in order.

    Raises:
        InputError: the file cannot be read to its end.
    """
    with _reported(source.path, key), _opened(source.path) as (file, position):
        records: list[Record] = []
        size = 0
        for record in _records_of(source.container, file):
            records.append(record)
            size += len(record[1])
            if len(records) == CHUNK_RECORDS or size >= CHUNK_BYTES:
                yield Chunk(source, tuple(records), position())
                records, size = [], 0
        if records:
            yield Chunk(source, tuple(records), position())


def json_lines(path: Path, key: str) -> Iterator[Record]:
    """Numbered lines that are not blank.

    Raises:
        InputError: the file cannot be read.
    """
    with _reported(path, key):
        yield from _records(path, "lines")


@contextmanager
def _reported(path: Path, key: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException, ValueError, ArithmeticError, RecursionError) as error:
        cause = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(f"{key}: {path} cannot be read: {cause}; check the path and the file") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Any]]:
    """The file's bytes, unpacked if its name ends in .gz, and a function that tells how far it has been read."""
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked, raw.tell  # type: ignore[misc]  # a GzipFile has all of IO that is used
        else:
            yield raw, raw.tell


def _records(path: Path, container: str) -> Iterator[Record]:
    with _opened(path) as (file, _):
        yield from _records_of(container, file)


def _records_of(container: str, file: IO[bytes]) -> Iterator[Record]:
    if container == "lines":
        return _lines(file)
    if container == "values":
        return _values(file)
    return _rows(_parquet_batches(file) if container == "parquet" else _arrow_batches(file))


def _text_container(path: Path) -> str:
    """`values` for an array of records or records that span lines, else `lines`: by content, not by name."""
    with _opened(path) as (file, _):
        lines = (line for line in _lines(file) if line[1].strip() != BOM)
        first, second = next(lines, None), next(lines, None)
    if first is None:
        return "lines"
    text = first[1].removeprefix(BOM).strip()
    try:
        json.loads(text)
        whole = True
    except (ValueError, RecursionError):
        whole = False
    array = text[:1] == b"[" and (second is None or not whole)
    spread = text == b"{" or (text[:1] == b"{" and not whole and second is not None and second[1][:1] in b" \t}")
    return "values" if array or spread else "lines"


def _lines(file: IO[bytes]) -> Iterator[Record]:
    number = 0
    while raw := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        rest = raw
        while len(rest) > MAX_RECORD_BYTES and not rest.endswith(b"\n"):  # too long: its beginning is refused
            rest = file.readline(MAX_RECORD_BYTES + 1)
        if not raw.isspace():
            yield number, raw.rstrip(b"\r\n")  # a last line without its end is the same record


_MARK = re.compile(rb'["\[\]{},]')
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def _values(file: IO[bytes]) -> Iterator[Record]:
    """Elements of an array, or values one after another, cut apart without being parsed.

    Whatever stands between two borders is a record, also if it is no JSON: it is refused later, with its line.
    """
    splitter = _Splitter()
    while block := file.read(BLOCK_BYTES):
        yield from splitter.feed(block)
        if splitter.pending_bytes > MAX_RECORD_BYTES:
            break
    yield from splitter.finish()


class _Splitter:
    """Where values end: at a comma of the outermost array, or where a value outside an array closes."""

    def __init__(self) -> None:
        self._buffer = b""
        self._start = 0  # of the value that has begun
        self._at = 0  # how far the buffer has been looked at
        self._line = 1  # of `_start`
        self._depth = 0
        self._array: bool | None = None  # inside the outermost array; None: nothing seen yet
        self._elements = 0

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer) - self._start

    def feed(self, block: bytes) -> Iterator[Record]:
        self._buffer = self._buffer[self._start :] + block
        self._start, self._at = 0, self._at - self._start
        if self._array is None:
            self._begin()
        while mark := _MARK.search(self._buffer, self._at):
            if mark[0] == b'"':
                string = _STRING.match(self._buffer, mark.start())
                if string is None:
                    self._at = mark.start()
                    return
                self._at = string.end()
            else:
                self._at = mark.end()
                yield from self._border(mark[0], mark.start())
        self._at = len(self._buffer)

    def finish(self) -> Iterator[Record]:
        """What is left at the end of the file."""
        self._at = len(self._buffer)
        yield from self._cut(self._at)

    def _begin(self) -> None:
        self._buffer = self._buffer.removeprefix(BOM)
        first = len(self._buffer) - len(self._buffer.lstrip())
        self._array = self._buffer[first : first + 1] == b"["
        if self._array:
            self._depth = 1
            self._line += self._buffer.count(b"\n", 0, first)
            self._start = self._at = first + 1

    def _border(self, mark: bytes, place: int) -> Iterator[Record]:
        if mark in b"[{":
            self._depth += 1
        elif mark == b",":
            if self._array and self._depth == 1:
                yield from self._cut(place, empty=True)
                self._elements += 1
        elif self._depth:
            self._depth -= 1
            if self._depth == 0:
                yield from self._cut(place if self._array else place + 1, empty=self._elements > 0)
                self._array, self._elements = False, 0

    def _cut(self, stop: int, *, empty: bool = False) -> Iterator[Record]:
        raw = self._buffer[self._start : stop]
        value = raw.strip()
        if value or empty:
            yield self._line + raw.count(b"\n", 0, len(raw) - len(raw.lstrip())), value
        self._line += self._buffer.count(b"\n", self._start, self._at)
        self._start = self._at


def _parquet_batches(file: IO[bytes]) -> Iterable[pa.RecordBatch]:
    return pa.parquet.ParquetFile(file).iter_batches(batch_size=TABLE_ROWS, use_threads=False)  # type: ignore[no-any-return]


def _arrow_batches(file: IO[bytes]) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow file, or of an Arrow stream (as `datasets` writes).

    Each is validated: pyarrow takes offsets from the file as they are, and a damaged one would end the process.
    """
    head = file.read(6)
    file.seek(0)
    if head == b"ARROW1":
        reader = pa.ipc.open_file(file)
        batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        batches = pa.ipc.open_stream(file)
    for batch in batches:
        batch.validate(full=True)
        for start in range(0, batch.num_rows, TABLE_ROWS):
            yield batch.slice(start, TABLE_ROWS)


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[Record]:
    row = 0
    for batch in batches:
        for data in _python_rows(batch):
            row += 1
            yield row, data if isinstance(data, bytes) else _as_json(data)


def _python_rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """Rows as Python values; one whose text is not UTF-8 as bytes that are neither, so that it alone is refused."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for place in range(batch.num_rows):
            try:
                yield from batch.slice(place, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield bytes(error.object)


def _as_json(row: Any) -> bytes:
    return json.dumps(_without_nulls(row), default=str, ensure_ascii=False).encode()


def _without_nulls(value: Any) -> Any:
    """A table gives every struct all fields that any of them has; those that are null were never there."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
