"""A regeneration from start to end, or from where the last one stopped."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from draftsmith.data.regenerate.record import Record
from draftsmith.data.regenerate.tasks import ERROR, SKIPPED, SUCCESS, Outcome, Task, read_tasks
from draftsmith.errors import InputError

GIVE_UP_AFTER = 50  # errors in a row: something is wrong with more than these records


class Answers(Protocol):
    """Something that answers: a model in this process, or servers."""

    def outcomes(self, tasks: Iterable[Task]) -> Iterator[Outcome]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Regenerated:
    """Counts of all records; the three add up to `total`. `asked`: answered by this run, the others were there."""

    total: int
    success: int
    error: int
    skipped: int
    asked: int
    tokens: int  # of this run


@dataclass(frozen=True, slots=True)
class Inputs:
    """Which records: files in order, the form they are read in (None: found out), and at most how many."""

    files: Sequence[str]
    form: str | None
    limit: int | None


def regenerate(
    inputs: Inputs,
    folder: Path,
    settings: Mapping[str, Any],
    answers: Answers,
    stop: threading.Event,
    *,
    retry_errors: bool = False,
    watch: Callable[[Outcome], None] = lambda outcome: None,
) -> Regenerated | None:
    """Answers every record that has no outcome in `folder` yet. None after a stop request.

    Args:
        settings: all that decides the answers, saved beside them.
        retry_errors: ask those that ended in an error again.
        watch: called with every new outcome.

    Raises:
        InputError, ConfigError: a file, a server or the folder cannot be used.
    """
    asked = tokens = errors_in_a_row = 0
    with Record(folder, settings, retry_errors=retry_errors) as record:
        todo = _Todo(inputs, record)
        for outcome in answers.outcomes(todo):
            record.add(outcome)
            watch(outcome)
            asked, tokens = asked + 1, tokens + outcome.tokens
            errors_in_a_row = errors_in_a_row + 1 if outcome.status == ERROR else 0
            if errors_in_a_row == GIVE_UP_AFTER:
                stop.set()
                raise InputError(
                    f"{GIVE_UP_AFTER} records in a row ended in an error, the last one: {outcome.reason}; mend it and "
                    "run the same command with --retry-errors"
                )
        if stop.is_set():
            return None
        counts: Counter[str] = record.finish(todo.total)
    total = Regenerated(todo.total, counts[SUCCESS], counts[ERROR], counts[SKIPPED], asked, tokens)
    assert total.success + total.error + total.skipped == total.total
    return total


class _Todo:
    """The tasks without an outcome, as a stream. Skipped records get theirs on the way. Iterated once."""

    def __init__(self, inputs: Inputs, record: Record) -> None:
        self._inputs, self._record = inputs, record
        self.total = 0

    def __iter__(self) -> Iterator[Task]:
        for item in read_tasks(self._inputs.files, self._inputs.form):
            if self._inputs.limit is not None and self.total == self._inputs.limit:
                return
            self.total += 1
            if item in self._record:
                continue
            if isinstance(item, Outcome):
                self._record.add(item)
            else:
                yield item
