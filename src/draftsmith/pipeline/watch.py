"""Signs of life: what every worker does, and the watch that ends a run in which nothing moves any more."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from draftsmith.pipeline.threads import POLL_S, Failure, thread_stacks


class StalledError(RuntimeError):
    """A worker, or all of them, made no progress for `pipeline.stall_s` seconds."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a worker does. `number` grows with every change, so two equal ones mean that nothing has happened."""

    number: int
    what: str
    waits: bool  # for other workers


class WorkerClock:
    """What a worker does now, and how long it has worked. Written by its worker, read by anybody."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.doing = Doing(0, "waiting", True)

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Around work on rows, which counts for the busy share."""
        began = time.perf_counter()
        with self.aside(what):
            yield
        self.busy_s += time.perf_counter() - began

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Around other work: evaluating, saving."""
        self.beat(what)
        yield
        self._now("waiting", True)

    def beat(self, what: str) -> None:
        """A sign of life, in the middle of work that takes long."""
        self._now(what, False)

    def _now(self, what: str, waits: bool) -> None:
        self.doing = Doing(self.doing.number + 1, what, waits)


class Watch:
    """Looks at the workers' clocks. Owner: the main thread, which calls `look` about every `POLL_S` seconds.

    Time is counted in looks, never read off a clock alone: a process that was stopped (Ctrl-Z, a sleeping laptop) has
    not stalled. A worker that waits for others is nobody's fault; if all wait, the run has stalled as a whole.
    """

    def __init__(self, clocks: Mapping[str, WorkerClock], limit_s: float, warn: Callable[[str], None]) -> None:
        self._clocks, self._limit_s, self._warn = clocks, limit_s, warn
        self._last = time.monotonic()
        self._seen = {name: clock.doing for name, clock in clocks.items()}
        self._still_s = dict.fromkeys(clocks, 0.0)
        self._warned: set[tuple[str, int]] = set()

    def look(self) -> Failure | None:
        """The failure of a run that has stalled. Half way there, a line says where it hangs."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, 2 * POLL_S), now
        for name, clock in self._clocks.items():
            doing = clock.doing
            self._still_s[name] = self._still_s[name] + passed if doing == self._seen[name] else 0.0
            self._seen[name] = doing
        stuck = [name for name, doing in self._seen.items() if not doing.waits]
        name = max(stuck or self._seen, key=self._still_s.__getitem__)
        still_s = self._still_s[name] if stuck else min(self._still_s.values())
        if still_s < self._limit_s / 2:
            return None
        doing, stacks = self._seen[name], thread_stacks()
        line = (
            f"for {still_s:.0f} s: {doing.what}" if stuck else f"for {still_s:.0f} s: all workers wait for each other"
        )
        place = stacks.get(name, ["unknown"])[-1]
        if still_s >= self._limit_s:
            remedy = "crash-report.json has all stacks; if this may take so long, raise it in the run's own config.yaml"
            return Failure(name, StalledError(f"no progress {line}, at {place} (pipeline.stall_s); {remedy}"), stacks)
        if (name, doing.number) not in self._warned:
            self._warned.add((name, doing.number))
            self._warn(f"warning: {name} has made no progress {line}, at {place}")
        return None

    def report(self) -> dict[str, str]:
        """What every worker does and for how long, for the crash report."""
        return {name: f"{doing.what}, for {self._still_s[name]:.0f} s" for name, doing in self._seen.items()}
