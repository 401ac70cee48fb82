"""What a long command shows of its progress."""

import sys
import time
from typing import Any, Self

from rich.progress import Progress, ProgressColumn

from draftsmith.report.console import console, say


class Ticker:
    """A bar or counter on a terminal, a line every `every_s` seconds elsewhere. A context manager."""

    def __init__(self, *columns: ProgressColumn, every_s: float, description: str = "", total: float = 100.0) -> None:
        self._bar = Progress(*columns, console=console) if sys.stdout.isatty() else None
        self._task = self._bar.add_task(description, total=total) if self._bar else None
        self._every_s, self._last = every_s, time.monotonic()

    def show(self, line: str, shown: str | None = None, **update: Any) -> None:
        """Shows `line`; on a terminal `shown` instead, and what else `rich` is to update."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=line if shown is None else shown, **update)
        elif time.monotonic() - self._last > self._every_s:
            self._last = time.monotonic()
            say(line)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
