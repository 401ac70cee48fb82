"""Where the time of a round goes, without adding a wait for the device."""

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds of all rounds: the drafter's, the target's, and the rest (sampling, transfer, caches, Python)."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    bookkeeping_s: float = 0.0


NO_TIME = Shares()


class RoundClock:
    """Marks the parts of each round in the order they run.

    On a CUDA device the marks are events of the stream; they are read when the round's results have arrived, so they
    have passed and cost no wait. Work that the device does while Python goes on counts as the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._sums = [0.0, 0.0, 0.0]
        self._marks: list[Any] = []
        self._began = 0.0

    def start(self) -> None:
        """A round begins."""
        self._began = time.perf_counter()
        self._marks = [self._mark()]

    def drafted(self) -> None:
        """The drafts are there, or queued."""
        self._marks.append(self._mark())

    def verified(self) -> None:
        """The target has read them, or its forward is queued."""
        self._marks.append(self._mark())

    def stop(self) -> None:
        """The round's results are on the host."""
        round_s = time.perf_counter() - self._began
        before, middle, after = self._marks
        draft_s, verify_s = self._between(before, middle), self._between(middle, after)
        for part, seconds in enumerate((draft_s, verify_s, max(0.0, round_s - draft_s - verify_s))):
            self._sums[part] += seconds

    def shares(self) -> Shares:
        """The sums so far."""
        return Shares(*self._sums)

    def _mark(self) -> Any:
        if self._cuda is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._cuda))
        return event

    def _between(self, first: Any, second: Any) -> float:
        return float(second - first if self._cuda is None else first.elapsed_time(second) / 1e3)
