"""Rows that cannot be learned from: left out, recorded in `bad-rows.jsonl`, and counted against a budget."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

from draftsmith.nouns import Row


class TooManyBadRowsError(RuntimeError):
    """More rows were left out than `train.max_bad_rows` allows."""


class BadRows:
    """The record of rows that were left out.

    Drafter replicas `note` theirs during a step, from their threads; replica 0 calls `settle` between steps. A step's
    lines are on disk before its line in `metrics.jsonl`, and a resumed run counts those that its checkpoint knew of.
    """

    def __init__(self, path: Path, budget: int) -> None:
        self._path, self._budget = path, budget
        self._lock = threading.Lock()
        self._noted: list[tuple[int, Sequence[int], Sequence[int], str]] = []
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._count = sum(len(json.loads(line)["rows"]) for line in lines)

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
        """Writes what was noted up to this step. Returns a warning per entry.

        Raises:
            TooManyBadRowsError: the budget is spent.
        """
        with self._lock:
            noted = sorted(n for n in self._noted if n[0] <= step)
            self._noted = [n for n in self._noted if n[0] > step]
        if not noted:
            return []
        lines = [
            json.dumps({"step": at, "rows": list(rows), "documents": list(documents), "reason": reason})
            for at, rows, documents, reason in noted
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))
        warnings = []
        for at, rows, _, reason in noted:
            self._count += len(rows)
            which = f"row {rows[0]}" if len(rows) == 1 else f"all rows from {rows[0]} to {rows[-1]}"
            warnings.append(
                f"warning: step {at} leaves out {which}: {reason} ({self._count} of at most {self._budget} rows; "
                f"{self._path.name} lists them)"
            )
        if self._count > self._budget:
            raise TooManyBadRowsError(
                f"{self._count} rows could not be learned from, train.max_bad_rows allows {self._budget}; the last: "
                f"{noted[-1][3]}. {self._path} lists them; the last checkpoint is whole"
            )
        return warnings
