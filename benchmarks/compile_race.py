"""Many threads, one compiler: what goes wrong without the guard, and with it.

Four drafter threads call compiled code 200 times each (a step with forward and backward, or compiled flex attention),
with shapes that change and more signatures than PyTorch's recompile limit. Two target threads run eager models, one
thread traces with torch.fx. Everything is checked against results computed before any thread started. The same
program runs twice, each time in a process of its own with a cold compiler cache: naive (`torch.compile`) and guarded
(`draftsmith.compile.guard`). Needs torch and transformers only.

    python benchmarks/compile_race.py [--json F]
"""

import argparse
import importlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftsmith.compile import guard, private

THREADS, CALLS = 4, 200
FLEX_EVERY, BUCKETS = 4, 3  # every fourth call is flex attention; 3 shapes x 4 threads are more than the limit of 8
PAIRS = 2000


@dataclass(frozen=True)
class Way:
    """How a program compiles, and what it puts around eager models and around tracers."""

    name: str
    compile: Callable[..., Callable[..., Any]]
    eager: Callable[[], AbstractContextManager[None]]
    tracing: Callable[[str], AbstractContextManager[None]]


WAYS = {
    "naive": Way("naive", lambda f, **o: torch.compile(f, dynamic=False, **o), nullcontext, lambda what: nullcontext()),
    "guarded": Way("guarded", guard.compile, guard.shared, guard.exclusive),
}


@dataclass
class Tally:
    """Counts of all threads."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, key: str, count: int = 1) -> None:
        with self.lock:
            self.counts[key] += count

    def failed(self, key: str, error: BaseException) -> None:
        with self.lock:
            self.counts[key] += 1
            self.errors[f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"] += 1


class Drafter:
    """One drafter thread's work and the results that it must have."""

    def __init__(self, number: int, way: Way, tally: Tally) -> None:
        random = torch.Generator().manual_seed(number)
        self.tally, self.number = tally, number
        with torch.random.fork_rng():
            torch.manual_seed(number)
            self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8))

        def step(x: Tensor) -> Tensor:
            if not torch.compiler.is_dynamo_compiling():
                tally.add("eager_runs")
            return self.model(x).square().sum()

        self.inputs = [torch.randn(4 + 3 * number + bucket * 16, 8, generator=random) for bucket in range(BUCKETS)]
        self.heads = [
            [torch.randn(1, 1 + number, 64 + 32 * bucket, 16, generator=random) for _ in range(3)]
            for bucket in range(BUCKETS)
        ]
        self.wanted_gradients = [self.gradient(step, x) for x in self.inputs]
        self.wanted_attention = [flex_attention(*heads) for heads in self.heads]
        self.step = way.compile(step, backend="aot_eager")
        self.attend = way.compile(flex_attention)

    def gradient(self, step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Gradient of the input: forward and backward."""
        x = x.clone().requires_grad_()
        step(x).backward()
        assert x.grad is not None
        return x.grad

    def run(self) -> None:
        for call in range(CALLS):
            bucket = call * BUCKETS // CALLS
            self.tally.add("calls")
            try:
                if call % FLEX_EVERY == FLEX_EVERY - 1:
                    out, wanted = self.attend(*self.heads[bucket]), self.wanted_attention[bucket]
                else:
                    out, wanted = self.gradient(self.step, self.inputs[bucket]), self.wanted_gradients[bucket]
            except BaseException as error:  # noqa: BLE001 - what fails is what is counted
                self.tally.failed("failures", error)
            else:
                if not torch.allclose(out, wanted, atol=1e-4):
                    self.tally.add("wrong_results")
            time.sleep(0.001)


class TargetThread:
    """An eager target with a replica of its own. `output_hidden_states` is what users of transformers write."""

    def __init__(self, number: int, way: Way, tally: Tally) -> None:
        config = Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8,
        )  # fmt: skip
        self.way, self.tally = way, tally
        self.model = Qwen3ForCausalLM(config).eval()
        self.ids = torch.randint(0, 64, (1, 32), generator=torch.Generator().manual_seed(number))
        self.wanted = self.forward()
        self.most_inside = 0

    def forward(self) -> tuple[Tensor, ...]:
        with self.way.eager(), torch.no_grad():
            hidden: tuple[Tensor, ...] = self.model(self.ids, output_hidden_states=True).hidden_states
            return hidden

    def run(self, done: threading.Event) -> None:
        while not done.is_set():
            self.tally.add("forwards")
            try:
                with self.way.eager():
                    hidden = self.forward()
                    self.most_inside = max(self.most_inside, len(guard.process_guard().inside()))
                if len(hidden) != len(self.wanted) or not all(map(torch.equal, hidden, self.wanted)):
                    self.tally.add("wrong_features")
            except BaseException as error:  # noqa: BLE001
                self.tally.failed("failed_forwards", error)
            time.sleep(0.001)


def trace_all_the_time(way: Way, tally: Tally, done: threading.Event) -> None:
    """A tracer that is not the compiler: quantisation tools, torch.export and others work like this."""
    model = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(8, 8), nn.ReLU())))
    wanted = len(torch.fx.symbolic_trace(model).graph.nodes)
    while not done.is_set():
        tally.add("traces")
        try:
            with way.tracing("tracing with torch.fx"):
                graph = torch.fx.symbolic_trace(model).graph
            if len(graph.nodes) != wanted:
                tally.add("wrong_graphs")
        except BaseException as error:  # noqa: BLE001
            tally.failed("wrong_graphs", error)
        time.sleep(0.05)


def count_dense_flex(tally: Tally) -> None:
    """Counts flex attention that runs as dense eager operations on real tensors."""
    flex_ops = importlib.import_module("torch._higher_order_ops.flex_attention")
    dense = flex_ops.math_attention

    def counting(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(query) is Tensor:
            tally.add("eager_runs")
        return dense(query, *args, **kwargs)

    flex_ops.math_attention = counting  # type: ignore[attr-defined]


def race(way: Way) -> dict[str, Any]:
    """Runs the program one way and counts."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    healthy = private.tracing_state()
    tally, done = Tally(), threading.Event()
    drafters = [Drafter(number, way, tally) for number in range(THREADS)]
    targets = [TargetThread(number, way, tally) for number in range(2)]
    count_dense_flex(tally)
    tally.counts.clear()
    others = [threading.Thread(target=target.run, args=(done,), name=f"target-{i}") for i, target in enumerate(targets)]
    others.append(threading.Thread(target=trace_all_the_time, args=(way, tally, done), name="tracer"))
    run_threads([threading.Thread(target=d.run, name=f"drafter-{d.number}") for d in drafters], others, done)
    names = ["calls", "failures", "eager_runs", "wrong_results", "forwards", "failed_forwards", "wrong_features"]
    names += ["traces", "wrong_graphs"]
    result: dict[str, Any] = {f"{way.name}_{name}": tally.counts[name] for name in names}
    result[f"damaged_after_{way.name}"] = private.damage(healthy)
    result[f"{way.name}_errors"] = dict(tally.errors.most_common(5))
    if way.name == "guarded":
        result["guarded_max_concurrent"] = max(target.most_inside for target in targets)
        result["forwards_between_compiles"] = forwards_between_compiles(targets[0])
        result |= overhead()
    return result


def run_threads(first: list[threading.Thread], others: list[threading.Thread], done: threading.Event) -> None:
    """Starts all; the others end when the first have."""
    for thread in first + others:
        thread.start()
    for thread in first:
        thread.join()
    done.set()
    for thread in others:
        thread.join()


def forwards_between_compiles(target: TargetThread) -> int:
    """Forwards of one target while two threads compile without a pause, so that one always waits for the other."""
    compiled, done, forwards = guard.compile(lambda x: x.sin().sum(), backend="aot_eager"), threading.Event(), 0

    def compile_many(first: int) -> None:
        for size in range(first, first + 40, 2):
            compiled(torch.ones(size))

    def forward() -> None:
        nonlocal forwards
        while not done.is_set():
            target.forward()
            forwards += 1

    compilers = [threading.Thread(target=compile_many, args=(first,)) for first in (3, 4)]
    run_threads(compilers, [threading.Thread(target=forward)], done)
    return forwards


def overhead() -> dict[str, float]:
    """Median extra time of a warm guarded call over the bare compiled call. A guarded call needs no key: what is
    compiled is looked up by the compiler's own guards, so both figures of the report are this one."""

    def work(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a.sin() * b + c).cos()

    arguments = [torch.randn(8, 8) for _ in range(3)]
    bare, guarded = torch.compile(work, dynamic=False), guard.compile(work)
    bare(*arguments), guarded(*arguments)
    extra = []
    for _ in range(PAIRS):
        began = time.perf_counter()
        bare(*arguments)
        between = time.perf_counter()
        guarded(*arguments)
        extra.append((time.perf_counter() - between) - (between - began))
    median_us = statistics.median(extra) * 1e6
    return {"overhead_us": median_us, "overhead_unkeyed_us": median_us}


def in_a_process(name: str) -> dict[str, Any]:
    """One way, in a fresh process with an empty compiler cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--way", name]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if run.returncode:
        raise SystemExit(f"{name} ended with {run.returncode}:\n{run.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(race(WAYS[options.way])))
        return
    result = {"torch": torch.__version__, **in_a_process("naive"), **in_a_process("guarded")}
    for key, value in result.items():
        print(f"{key:28} {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
