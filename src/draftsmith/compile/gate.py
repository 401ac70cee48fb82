"""One gate per process between code that may trace and code that must not see it. Pure Python, knows no PyTorch.

Many threads may be inside shared; one may be inside exclusive, with nobody else inside. Entering shared while nobody
compiles costs two attribute stores, one load and a look at the thread's number.
"""

import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident


class GateTimeout(RuntimeError):
    """Somebody held the gate longer than the time limit. The message says who, since when, and where it stands."""


class Hold:
    """A thread's own place in the gate: a context manager that enters shared. Re-entrant; used by its thread alone."""

    __slots__ = ("__weakref__", "count", "gate", "ident", "thread")

    def __init__(self, gate: "Gate") -> None:
        self.gate, self.count, self.thread = gate, 0, threading.current_thread()
        self.ident = get_ident()

    def __enter__(self) -> None:
        if get_ident() != self.ident:
            raise RuntimeError(f"this place is thread {self.thread.name!r}'s own; ask for one in each thread")
        self.count += 1
        writer = self.gate.writer
        if writer is not None and self.count == 1 and writer is not self:
            self.gate.wait_for_turn(self)

    def __exit__(self, *error: object) -> None:
        self.count -= 1
        if self.gate.writer is not None and not self.count:
            self.gate.wake()

    def where(self) -> str:
        """What this thread does now, for an error message."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        stack = traceback.extract_stack(frame)[-3:] if frame else []
        lines = " < ".join(f"{entry.filename}:{entry.lineno} {entry.name}" for entry in reversed(stack))
        return f"thread {self.thread.name!r} at {lines or 'an unknown place'}"


class Gate:
    """A phase-fair lock with many readers and one writer.

    Owner: one per process (`draftsmith.compile.guard`). Promises:
    - Exclusive holders come in the order they asked. Whoever waits to enter shared when one of them leaves gets in
      before the next; so neither side starves.
    - Re-entrant in every combination. A thread that asks for exclusive while inside shared gives its shared place up
      while it waits, so two of them cannot deadlock; it has it back afterwards.
    - Nobody waits longer than `time_limit_s`: `GateTimeout` names who is inside.
    - A thread that dies inside leaves as soon as somebody waits for it, and so does every other thread in a forked
      child (`forget_other_threads`). What an asynchronous exception tears off between two bytecodes is bounded by
      this and by the time limit.
    Locks: `_changed` guards everything but the counts. A thread writes its own count; only for a thread that waits
    does the leaving exclusive holder write it. Needs the order of stores and loads that the GIL gives.
    """

    def __init__(self, time_limit_s: float) -> None:
        self.time_limit_s = time_limit_s
        self.writer: Hold | None = None  # who compiles, or waits for the others to leave
        self._what, self._since = "", 0.0
        self._local = threading.local()
        self._changed = threading.Condition()
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()
        self._exclusive_queue: deque[Hold] = deque()
        self._shared_queue: list[Hold] = []

    def mine(self) -> Hold:
        """The calling thread's place. `with gate.mine():` enters shared."""
        try:
            hold: Hold = self._local.hold
        except AttributeError:
            hold = self._local.hold = Hold(self)
            with self._changed:
                self._holds.add(hold)
        return hold

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Inside alone. `what` is named to those who wait too long.

        Raises:
            GateTimeout: others stayed inside for longer than the time limit.
        """
        mine = self.mine()
        if self.writer is mine:
            yield
            return
        kept, mine.count = mine.count, 0
        try:
            self._acquire(mine, what)
            yield
        finally:
            self._leave(mine, kept)

    def wait_for_turn(self, hold: Hold) -> None:
        """Slow path of entering shared: somebody is exclusive. Returns inside."""
        with self._changed:
            if self.writer is None:
                return
            hold.count = 0
            self._shared_queue.append(hold)
            self._changed.notify_all()
            try:
                self._wait(lambda: hold.count > 0, lambda: f"{self._what} for {self._held_s():.0f} s: {self._holder()}")
            except BaseException:
                if hold in self._shared_queue:
                    self._shared_queue.remove(hold)
                hold.count = 0
                self._changed.notify_all()
                raise

    def wake(self) -> None:
        """Tells the thread that waits to be alone that one more has left."""
        with self._changed:
            self._changed.notify_all()

    def inside(self) -> list[str]:
        """Names of the threads inside now: those that share, or the one that is alone."""
        with self._changed:
            alone = [self.writer] if self.writer is not None else []
            return [hold.thread.name for hold in self._others(None) or alone]

    def forget_other_threads(self) -> bool:
        """For a forked child, where only the thread that forked lives on. Was one of the others alone inside?"""
        mine, other_was_alone = getattr(self._local, "hold", None), False
        self._changed = threading.Condition()  # another thread may have held it
        self._holds = weakref.WeakSet([mine] if mine is not None else [])
        self._exclusive_queue.clear()
        self._shared_queue.clear()
        if self.writer is not mine:
            self.writer, other_was_alone = None, self.writer is not None
        return other_was_alone

    def _acquire(self, mine: Hold, what: str) -> None:
        with self._changed:
            self._exclusive_queue.append(mine)
            self._changed.notify_all()
            self._wait(
                lambda: self.writer is None and self._exclusive_queue[0] is mine,
                lambda: f"{self._what} for {self._held_s():.0f} s: {self._holder()}",
            )
            self._exclusive_queue.popleft()
            self.writer, self._what, self._since = mine, what, time.monotonic()
            self._wait(lambda: not self._others(mine), lambda: "; ".join(h.where() for h in self._others(mine)))
            self._since = time.monotonic()

    def _leave(self, mine: Hold, kept: int) -> None:
        """Also the way out of a failed `_acquire`."""
        with self._changed:
            if mine in self._exclusive_queue:
                self._exclusive_queue.remove(mine)
            mine.count = kept
            if self.writer is mine:
                self._open()
            self._changed.notify_all()

    def _open(self) -> None:
        """The end of an exclusive hold: who waits to enter shared is inside before anybody else can close again."""
        for hold in self._shared_queue:
            hold.count = 1
        self._shared_queue.clear()
        self.writer = None

    def _others(self, mine: Hold | None) -> list[Hold]:
        return [hold for hold in self._holds if hold.count and hold is not mine and hold.thread.is_alive()]

    def _wait(self, ready: Callable[[], bool], blockers: Callable[[], str]) -> None:
        end = time.monotonic() + self.time_limit_s
        while not ready():
            left = end - time.monotonic()
            if left <= 0:
                raise GateTimeout(f"waited {self.time_limit_s:g} s at the compile gate; inside: {blockers()}")
            self._changed.wait(min(left, 1.0))
            if self.writer is not None and not self.writer.thread.is_alive():
                self._open()
                self._changed.notify_all()

    def _holder(self) -> str:
        return self.writer.where() if self.writer else "nobody"

    def _held_s(self) -> float:
        return time.monotonic() - self._since
