"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from draftsmith.nouns import StepRecord
from draftsmith.pipeline.channel import ChannelStatistics
from draftsmith.redaction import without_secrets

PLAIN_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """Cumulative busy seconds per worker and the channel's level."""

    busy_s: Mapping[str, float]
    channel: ChannelStatistics


class Display(Protocol):
    """A listener of the journal that is opened and closed around the run."""

    def step(self, record: StepRecord, tau: float | None) -> None: ...

    def log(self, line: str) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """Lines for logs and pipes: every few seconds, and whenever τ was measured."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps, self._last = console, steps, 0.0
        self._pace = _Pace(steps)

    def step(self, record: StepRecord, tau: float | None) -> None:
        left_s = self._pace.left_s(record)
        now = time.monotonic()
        if tau is None and now - self._last < PLAIN_EVERY_S and record.step != self._steps:
            return
        self._last = now
        measured = f" τ {tau:.3f}" if tau is not None else ""
        self.log(
            f"step {record.step}/{self._steps} loss {_number(record.loss)}{measured} {record.tokens_per_s:.0f} "
            f"tokens/s left {_duration(left_s)}"
        )

    def log(self, line: str) -> None:
        self._console.print(without_secrets(line), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class LiveDisplay:
    """A live table: loss, τ, tokens/s, busy share of every worker, bytes in the channel, time left."""

    def __init__(self, console: Console, steps: int, gauges: Callable[[], Gauges]) -> None:
        self._steps, self._gauges = steps, gauges
        self._pace = _Pace(steps)
        self._tau: float | None = None
        self._before: tuple[float, Mapping[str, float]] | None = None
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def step(self, record: StepRecord, tau: float | None) -> None:
        self._tau = self._tau if tau is None else tau
        self._live.update(self._render(record, self._pace.left_s(record)))

    def log(self, line: str) -> None:
        self._live.console.print(without_secrets(line), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _render(self, record: StepRecord, left_s: float) -> Group:
        gauges = self._gauges()
        table = Table.grid(padding=(0, 3))
        tau = "not measured yet" if self._tau is None else f"{self._tau:.3f}"
        table.add_row("step", f"{record.step} / {self._steps}", "left", _duration(left_s))
        table.add_row("loss", _number(record.loss), "τ (decoded)", tau)
        table.add_row("tokens/s", f"{record.tokens_per_s:,.0f}", "learning rate", f"{record.lr:.2e}")
        channel = gauges.channel
        table.add_row(
            "channel", f"{channel.used_bytes / 2**20:.1f} of {channel.capacity_bytes / 2**20:.0f} MiB", "", ""
        )
        busy = Text("busy  ") + Text("   ".join(f"{name} {share:.0%}" for name, share in self._shares(gauges)))
        bar = Table.grid()
        bar.add_row(ProgressBar(self._steps, record.step, width=60))
        return Group(bar, table, busy)

    def _shares(self, gauges: Gauges) -> list[tuple[str, float]]:
        now = time.perf_counter()
        before = self._before
        self._before = (now, gauges.busy_s)
        if before is None:
            return [(name, 0.0) for name in gauges.busy_s]
        span = max(1e-9, now - before[0])
        return [(name, min(1.0, (busy - before[1][name]) / span)) for name, busy in gauges.busy_s.items()]


class TensorBoard:
    """Scalars for TensorBoard, in the run directory."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def step(self, record: StepRecord, tau: float | None) -> None:
        for name in ("loss", "lr", "grad_norm", "tokens_per_s"):
            if (value := getattr(record, name)) is not None:
                self._writer.add_scalar(f"train/{name}", value, record.step)
        if tau is not None:
            self._writer.add_scalar("eval/tau", tau, record.step)

    def log(self, line: str) -> None:
        pass

    def close(self) -> None:
        self._writer.close()


class Displays:
    """Several listeners as one, closed together."""

    def __init__(self, displays: list[Display]) -> None:
        self._displays = displays

    def step(self, record: StepRecord, tau: float | None) -> None:
        for display in self._displays:
            display.step(record, tau)

    def log(self, line: str) -> None:
        for display in self._displays:
            display.log(line)

    def __enter__(self) -> "Displays":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for display in self._displays:
            display.close()


class _Pace:
    """Time left, from the steps' own mean time: evaluations and checkpoints in between do not count."""

    def __init__(self, steps: int) -> None:
        self._steps, self._seen, self._seconds = steps, 0, 0.0

    def left_s(self, record: StepRecord) -> float:
        self._seen += 1
        self._seconds += record.step_s
        return self._seconds / self._seen * (self._steps - record.step)


def _number(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.4f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
