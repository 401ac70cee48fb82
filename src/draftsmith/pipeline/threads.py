"""Worker threads whose outcome is a value: the first failure stops all, is reported first, and nobody hangs."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.errors import StoppedError

JOIN_S = 5.0  # how long workers may take to end after one has failed


@dataclass(frozen=True, eq=False, slots=True)
class Failure:
    """Which worker failed first, and how."""

    worker: str
    error: BaseException


class Crew:
    """The threads of a run.

    Owner: the main thread, which calls `run` once. Promises: every worker's exception is caught; the first one that is
    not a `StoppedError` is *the* failure; `stop` is then called once, from the failing thread, to wake whoever waits;
    the main thread learns of it at once. Workers that do not end within `JOIN_S` (stuck in native code) are named and
    abandoned: they are daemons and die with the process.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
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
        for _ in threads:
            self._ended.acquire()  # not join(): the first failure must be seen while others still run
            if self.failure is not None:
                break
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

    def _body(self, name: str, body: Callable[[], None]) -> None:
        try:
            body()
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - the outcome of a thread is a value
            with self._lock:
                first = self.failure is None
                if first:
                    self.failure = Failure(name, error)
            if first:
                self._stop()
        finally:
            self._ended.release()
