"""Worker threads whose outcome is a value: the first failure stops all, is reported first, and nobody hangs."""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from draftsmith.errors import StoppedError

JOIN_S = 5.0  # how long workers may take to end after one has failed
POLL_S = 1.0  # between two looks at workers that still run


class KilledError(RuntimeError):
    """A worker was ended by what would end a program, such as SystemExit. Raised on, that would look like success."""


@dataclass(frozen=True, eq=False, slots=True)
class Failure:
    """Which worker failed first, how, and where every thread of the process was at that moment."""

    worker: str
    error: BaseException
    stacks: Mapping[str, list[str]]


def thread_stacks() -> dict[str, list[str]]:
    """Per thread its frames, outermost first, as `file:line function`: no values, so nothing of the data."""
    frames = sys._current_frames()
    return {
        thread.name: [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack(frames[thread.ident])]
        for thread in threading.enumerate()
        if thread.ident in frames
    }


class Crew:
    """The threads of a run.

    Owner: the main thread, which calls `run` once. Promises: every worker's exception is caught; the first one that is
    not a `StoppedError` is *the* failure; `stop` is then called once, from the failing thread, to wake whoever waits;
    the main thread learns of it at once. Workers that do not end within `JOIN_S` (stuck in native code) are named and
    abandoned: they are daemons and die with the process. So are those that `watch`, asked every `POLL_S` seconds while
    workers run, says have stalled.
    """

    def __init__(self, stop: Callable[[], None], watch: Callable[[], Failure | None] = lambda: None) -> None:
        self._stop, self._watch = stop, watch
        self._lock = threading.Lock()
        self._ended = threading.Semaphore(0)
        self.failure: Failure | None = None

    def run(self, workers: Sequence[tuple[str, Callable[[], None]]], on_failure: Callable[[Failure], None]) -> None:
        """Starts one named thread per worker and waits for all.

        Args:
            workers: name and body.
            on_failure: called in the main thread, at once, with the first failure (to print the cause first).

        Raises:
            The first failure's exception, after the others have ended or been abandoned.
        """
        threads = [
            threading.Thread(target=self._body, args=(name, body), name=name, daemon=True) for name, body in workers
        ]
        for thread in threads:
            thread.start()
        try:
            self._wait(len(threads))
        except BaseException as error:  # noqa: BLE001 - raised below, when the workers have ended
            self._fail(Failure("main thread", error, thread_stacks()))
        if self.failure is None:
            return
        on_failure(self.failure)
        deadline = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            self.failure.error.add_note(f"abandoned, still busy after {JOIN_S:.0f} s: {', '.join(stuck)}")
        raise self.failure.error

    def _wait(self, workers: int) -> None:
        """Until all have ended, or one has failed: not join(), as that must be seen while others still run."""
        for _ in range(workers):
            while not self._ended.acquire(timeout=POLL_S):
                if (stalled := self._watch()) is not None:
                    self._fail(stalled)
                    return
            if self.failure is not None:
                return

    def _body(self, name: str, body: Callable[[], None]) -> None:
        try:
            body()
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - the outcome of a thread is a value
            if not isinstance(error, Exception):
                cause, error = error, KilledError(f"the thread was ended by {type(error).__name__}")
                error.__cause__ = cause
            self._fail(Failure(name, error, thread_stacks()))
        finally:
            self._ended.release()

    def _fail(self, failure: Failure) -> None:
        with self._lock:
            first = self.failure is None
            if first:
                self.failure = failure
        if first:
            self._stop()
