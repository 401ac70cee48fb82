"""How much of the ideal the pipeline reaches: one target worker alone, one drafter worker alone, and the whole.

One intra-op thread per worker, the embedded target, the demo's drafter. With single rates t and d (rows per second),
T + D workers on C cores can reach min(T t, D d, C / (1/t + 1/d)). The three measurements alternate; rates are medians.

    python benchmarks/pipeline.py [--topology 1+1 2+1] [--rows 160] [--json F]
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from draftsmith import embedded
from draftsmith.config import load_config
from draftsmith.nouns import Features, StepRecord
from draftsmith.pipeline.channel import Channel
from draftsmith.pipeline.machine import cpu_cores
from draftsmith.pipeline.prepare import Job, prepare
from draftsmith.pipeline.trainer import Run

REPEATS = 5


@dataclass(frozen=True)
class Share:
    """One line of the table; rates are rows per second."""

    topology: str
    target_rows_s: float
    drafter_rows_s: float
    both_rows_s: float
    ideal_rows_s: float
    share: float
    wait_share: float  # of all workers' time, spent waiting for rows or for room
    target_python_share: float  # of a target worker's time alone, outside tensor operations
    drafter_python_share: float


class Steps:
    """A listener that keeps when steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def step(self, record: StepRecord, tau: float | None) -> None:
        self.ends.append(time.perf_counter())

    def log(self, line: str) -> None:
        pass

    def rows_per_s(self, rows_per_step: int) -> float:
        """Without the first step, which pays for starting."""
        return (len(self.ends) - 1) * rows_per_step / (self.ends[-1] - self.ends[0])


def make_job(topology: str, rows: int) -> Job:
    overrides = [f"topology={topology}", "pipeline.threads=1", "run.dir=unused", "eval.every=0"]
    overrides += ["checkpoint.every=0", "pipeline.channel_mib=32"]  # small, so that a short run is in its steady state
    config = load_config(embedded.CONFIG, overrides)
    job = prepare(config)
    return replace(job, steps=rows // config.train.rows_per_step)


def make_run(job: Job, folder: str, channel: Channel[Features] | None = None) -> tuple[Run, Steps]:
    run = Run(job, Path(tempfile.mkdtemp(dir=folder)), None, threading.Event())
    steps = Steps()
    run.journal.listeners.append(steps)
    if channel is not None:
        run.channel = channel
        for worker in run.drafters.values():
            worker.channel = channel
    return run, steps


def target_alone(job: Job, folder: str) -> tuple[float, list[Features]]:
    """Rows per second of one target worker whose features are taken at once; also the features."""
    run, _ = make_run(job, folder)
    rows = job.steps * job.config.train.rows_per_step
    features: list[Features] = []
    consumer = threading.Thread(target=lambda: features.extend(run.channel.take(n) for n in range(rows)))
    consumer.start()
    began = time.perf_counter()
    next(iter(run.targets.values())).run()
    seconds = time.perf_counter() - began
    consumer.join()
    return rows / seconds, features


def drafter_alone(job: Job, folder: str, features: list[Features]) -> float:
    """Rows per second of one drafter worker whose features are all there."""
    channel: Channel[Features] = Channel(sum(f.nbytes for f in features) + 1)
    for item in features:
        channel.reserve(item.row.index, item.nbytes)
        channel.put(item.row.index, item)
    run, steps = make_run(job, folder, channel)
    next(iter(run.drafters.values())).run(1, run.journal.record, run.stop)
    return steps.rows_per_s(job.config.train.rows_per_step)


def both(job: Job, folder: str) -> tuple[float, float]:
    """Rows per second of the whole, and the share of the workers' time that was spent waiting."""
    run, steps = make_run(job, folder)
    began = time.perf_counter()
    run.run(lambda failure: None)
    seconds = time.perf_counter() - began
    busy = sum(run.gauges().busy_s.values())
    return steps.rows_per_s(job.config.train.rows_per_step), 1 - busy / (seconds * job.topology.workers)


def python_share(body: Callable[[], Any]) -> float:
    """Share of the time of `body` that no tensor operation accounts for."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        began = time.perf_counter()
        body()
        seconds = time.perf_counter() - began
    operations = sum(e.self_cpu_time_total for e in trace.key_averages() if e.key.startswith("aten::")) / 1e6
    return max(0.0, 1 - operations / seconds)


def measure(topology: str, rows: int) -> Share:
    job = make_job(topology, rows)
    alone = replace(make_job("1+1", rows), steps=job.steps)
    with tempfile.TemporaryDirectory() as folder:
        rates = []
        for _ in range(REPEATS):
            t, features = target_alone(alone, folder)
            d = drafter_alone(alone, folder, features)
            rows_s, wait = both(job, folder)
            rates.append((t, d, rows_s, wait))
        t, d, rows_s, wait = (statistics.median(column) for column in zip(*rates, strict=True))
        few = replace(alone, steps=4)
        part = features[: 4 * few.config.train.rows_per_step]
        target_python = python_share(lambda: target_alone(few, folder))
        drafter_python = python_share(lambda: drafter_alone(few, folder, part))
    targets, drafters = len(job.topology.target), len(job.topology.drafter)
    ideal = min(targets * t, drafters * d, cpu_cores() / (1 / t + 1 / d))
    return Share(topology, t, d, rows_s, ideal, rows_s / ideal, wait, target_python, drafter_python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="+", default=["1+1", "2+1"])
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for topology in options.topology:
        result = measure(topology, options.rows)
        results.append(asdict(result))
        print(
            f"{topology}: target {result.target_rows_s:.1f} rows/s, drafter {result.drafter_rows_s:.1f}, together "
            f"{result.both_rows_s:.1f} of {result.ideal_rows_s:.1f} ({result.share:.0%}); waiting "
            f"{result.wait_share:.0%}; Python {result.target_python_share:.0%} of a target's and "
            f"{result.drafter_python_share:.0%} of a drafter's time; copies none (all workers share the CPU's memory)"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
