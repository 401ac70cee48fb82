"""The one bounded queue of the system: bounded in bytes, reserved in order, closed for everybody at once."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from draftsmith.errors import StoppedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """A snapshot. Bytes are those of items that are reserved, waiting, or being filled."""

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    items: int
    put_wait_s: float
    get_wait_s: float


class Channel(Generic[T]):
    """Numbered items on their way from producers to consumers.

    Owner: the run that made it. One lock guards everything. Guarantees:

    - Space is reserved in the order of the numbers, before an item is made. So the lowest number nobody has taken yet
      always has its space, and a consumer that takes numbers in order never waits behind a full channel, however slow
      one of several producers is.
    - At most `capacity_bytes` are reserved at any time. A single item larger than that is refused with ValueError.
    - `close` wakes every waiter, which raises `StoppedError`.
    """

    def __init__(self, capacity_bytes: int, *, first: int = 0) -> None:
        """`first` is the first number that will be reserved (a resumed run does not start at 0)."""
        self.capacity_bytes = capacity_bytes
        self._changed = threading.Condition()
        self._items: dict[int, T] = {}
        self._sizes: dict[int, int] = {}
        self._next_reservation = first
        self._used_bytes = self._peak_bytes = 0
        self._put_wait_s = self._get_wait_s = 0.0
        self._closed = False

    def reserve(self, number: int, nbytes: int) -> None:
        """Waits until `number` is next and `nbytes` are free, and sets them aside."""
        if nbytes > self.capacity_bytes:
            raise ValueError(
                f"item {number} needs {nbytes} bytes, the channel holds {self.capacity_bytes}; "
                "raise pipeline.channel_mib or lower data.row_tokens"
            )
        with self._changed:
            began = time.perf_counter()
            self._wait_for(
                lambda: number == self._next_reservation and self._used_bytes + nbytes <= self.capacity_bytes
            )
            self._put_wait_s += time.perf_counter() - began
            self._next_reservation += 1
            self._sizes[number] = nbytes
            self._used_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            self._changed.notify_all()

    def put(self, number: int, item: T) -> None:
        """Hands in the item for a reservation."""
        with self._changed:
            if self._closed:
                raise StoppedError("the channel is closed")
            assert number in self._sizes, f"item {number} was not reserved"
            self._items[number] = item
            self._changed.notify_all()

    def take(self, number: int) -> T:
        """Waits for an item and frees its bytes. Every number is taken once, by one consumer."""
        with self._changed:
            began = time.perf_counter()
            self._wait_for(lambda: number in self._items)
            self._get_wait_s += time.perf_counter() - began
            self._used_bytes -= self._sizes.pop(number)
            self._changed.notify_all()
            return self._items.pop(number)

    def close(self) -> None:
        """Ends the traffic: items still inside are dropped, waiters raise `StoppedError`."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def statistics(self) -> ChannelStatistics:
        with self._changed:
            return ChannelStatistics(
                self.capacity_bytes,
                self._used_bytes,
                self._peak_bytes,
                len(self._items),
                self._put_wait_s,
                self._get_wait_s,
            )

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._closed or ready())
        if self._closed:
            raise StoppedError("the channel is closed")
