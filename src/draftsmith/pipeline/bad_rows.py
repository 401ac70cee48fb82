"""Rows that cannot be learned from: left out, recorded in `bad-rows.jsonl`, and counted against a budget."""

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from draftsmith.errors import InputError
from draftsmith.nouns import Row
from draftsmith.pipeline.metrics import StepLog


class TooManyBadRowsError(RuntimeError):
    """More rows were left out than `train.max_bad_rows` allows."""


class BadRows:
    """The record of rows that were left out.

    Drafter replicas `note` theirs during a step, from their threads; replica 0 calls `settle` between steps. A step's
    lines are on disk before its line in `metrics.jsonl`, and a resumed run counts those that its checkpoint knew of.
    """

    def __init__(self, folder: Path, step: int, budget: int) -> None:
        """`step` is that of the checkpoint: what came later will come again."""
        self.path, self._budget = folder / "bad-rows.jsonl", budget
        self._lock = threading.Lock()
        self._noted: list[tuple[int, Sequence[int], Sequence[int], str]] = []
        self._lines = StepLog(self.path, step)
        self._count = _rows_in(self.path)

    def note(self, step: int, row: Row, reason: str) -> None:
        """A row of this step (from 1) was left out."""
        with self._lock:
            self._noted.append((step, [row.index], [span.document for span in row.spans], reason))

    def note_step(self, step: int, rows: range, reason: str) -> None:
        """A whole step was left out."""
        with self._lock:
            self._noted = [noted for noted in self._noted if noted[0] != step]
            self._noted.append((step, list(rows), [], reason))

    def settle(self, step: int) -> list[str]:
        """Counts what was noted up to this step. Returns a warning per entry.

        Raises:
            TooManyBadRowsError: the budget is spent.
        """
        with self._lock:
            noted = sorted(n for n in self._noted if n[0] <= step)
            self._noted = [n for n in self._noted if n[0] > step]
        if not noted:
            return []
        warnings = []
        for at, rows, documents, reason in noted:
            self._lines.add({"step": at, "rows": list(rows), "documents": list(documents), "reason": reason})
            self._count += len(rows)
            which = f"row {rows[0]}" if len(rows) == 1 else f"all rows from {rows[0]} to {rows[-1]}"
            warnings.append(
                f"warning: step {at} leaves out {which}: {reason} ({self._count} of at most {self._budget} rows; "
                f"{self.path.name} lists them)"
            )
        if self._count > self._budget:
            with suppress(OSError):  # a full disk is not the cause
                self.write()
            raise TooManyBadRowsError(
                f"{self._count} rows could not be learned from, train.max_bad_rows allows {self._budget}; the last: "
                f"{noted[-1][3]}. {self.path} lists them; the last checkpoint is whole. If so many "
                "may be left out, raise it in the run's own config.yaml"
            )
        return warnings

    def write(self) -> None:
        """Writes what was counted. Raises what `StepLog.write` raises."""
        self._lines.write()

    def sync(self) -> None:
        """Makes the lines durable."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


def _rows_in(path: Path) -> int:
    """How many rows the lines of an interrupted run name.

    Raises:
        InputError: a line is damaged.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    count = 0
    for number, line in enumerate(lines, 1):
        try:
            count += len(json.loads(line)["rows"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(f"{path}:{number} is damaged; remove the line to go on without counting it") from None
    return count
