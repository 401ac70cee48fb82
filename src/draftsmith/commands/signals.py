"""Stopping on request: a run that can save itself is asked first, and only then ended."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}  # exit codes


@contextmanager
def stoppable() -> Iterator[tuple[threading.Event, "ExitCode"]]:
    """The first Ctrl-C or SIGTERM asks the run to save and end; the second ends the process at once."""
    stop = threading.Event()
    code = ExitCode()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(INTERRUPTED[signal.Signals(number)])
        code.value = INTERRUPTED[signal.Signals(number)]
        stop.set()
        with suppress(OSError):  # not print(): a handler may interrupt another print, and nobody may be left to read it
            os.write(2, b"stopping after this step; once more to abort at once\n")

    previous = {number: signal.signal(number, handle) for number in INTERRUPTED}
    try:
        yield stop, code
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


class ExitCode:
    """0, or what the signal that came asks for."""

    value = 0

    def __call__(self) -> int:
        return self.value
