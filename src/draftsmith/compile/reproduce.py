"""The race in one small program, with the guard and without. PyTorch only: `python -m draftsmith.compile.reproduce`.

Threads: one calls compiled code that is warm, one calls an eager model of its own, one compiles new shapes and, in
the harder half, one traces with FX, as export and quantisation tools do. Prints one JSON line per phase. Each naive
phase has a process of its own, because what it breaks may stay broken.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from draftsmith.compile import guard, hunt, private

PHASE_S = 4.0  # of each of the four phases, after imports
TRACE_S = 0.003  # how long the traced function takes; models of real size take seconds
COMPILER_PAUSE_S = 0.01
JOIN_S, PROCESS_S = 30.0, 180.0  # a thread, a process that takes longer hangs
PROCESSES = {  # (guarded, tracer) of its phases; what is naive may break its process
    "guarded": [(True, False), (True, True)],
    "naive-compile": [(False, False)],
    "naive-trace": [(False, True)],
}


@dataclass(frozen=True, slots=True)
class Phase:
    """What happened in a phase. `failures` of `calls`; `kinds` says which; `left_on` is damage that stays."""

    torch: str
    guarded: bool
    tracer: bool  # is there a thread that traces with FX, or do all only compile?
    calls: int
    failures: int
    kinds: dict[str, int]
    compilations: int
    traces: int
    left_on: list[str]


@dataclass(eq=False, slots=True)
class Ways:
    """How the threads reach the compiler: bare, or through the guard."""

    compile: Callable[..., Any]
    shared: Callable[[], AbstractContextManager[Any]]
    exclusive: Callable[[str], AbstractContextManager[Any]]


NAIVE = Ways(torch.compile, nullcontext, lambda what: nullcontext())
GUARDED = Ways(guard.compile, guard.shared, guard.exclusive)


class Model(nn.Module):
    """Eager code that asks whether it is being compiled, as transformers does; nobody compiles it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))

    def forward(self, hidden: Tensor) -> tuple[Tensor, bool]:
        return self.layers(hidden), torch.compiler.is_compiling()


@dataclass(eq=False, slots=True)
class Race:
    """The threads of a phase and what they saw."""

    ways: Ways
    tracer: bool
    phase_s: float
    kinds: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        torch.manual_seed(0)
        warm = self.ways.compile(_warm, backend="eager", dynamic=False)
        model, x = Model().eval(), torch.randn(4, 16)
        with torch.no_grad():
            expected, expected_hidden = warm(x), model(x)[0]
        cold = self.ways.compile(_cold, backend="aot_eager", dynamic=False)
        bodies = {
            "compiled call": lambda n: self._same("compiled call", warm(x), expected),
            "eager model": lambda n: self._model(model, x, expected_hidden),
            "compilation": lambda n: cold(torch.randn(3 + n, 5)),
        }
        if self.tracer:
            bodies["trace"] = lambda n: self._trace()
        threads = [threading.Thread(target=self._loop, args=pair, name=pair[0], daemon=True) for pair in bodies.items()]
        for thread in threads:
            thread.start()
        time.sleep(self.phase_s)
        self.stop.set()
        for thread in threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                self.kinds[f"{thread.name}: hangs"] += 1

    def _loop(self, name: str, body: Callable[[int], None]) -> None:
        with private.compile_settings(10**6), torch.no_grad():
            while not self.stop.is_set():
                try:
                    body(self.rounds[name])
                except Exception as error:  # noqa: BLE001 - what is counted
                    self.kinds[f"{name}: {type(error).__name__}: {str(error)[:70]}"] += 1
                self.rounds[name] += 1
                time.sleep(COMPILER_PAUSE_S if name == "compilation" else 0)

    def _same(self, name: str, got: Tensor, expected: Tensor) -> None:
        if not torch.equal(got, expected):
            self.kinds[f"{name}: wrong result"] += 1

    def _model(self, model: Model, x: Tensor, expected: Tensor) -> None:
        with self.ways.shared():
            hidden, compiling = model(x)
        if compiling:
            self.kinds["eager model: was told that it is being compiled"] += 1
        self._same("eager model", hidden, expected)

    def _trace(self) -> None:
        with self.ways.exclusive("tracing"):
            graph = torch.fx.Tracer().trace(_traced)
        if [node.op for node in graph.nodes] != ["placeholder", "call_function", "output"]:
            self.kinds["trace: another thread's calls are in the graph"] += 1


def _warm(x: Tensor) -> Tensor:
    return x.sin() + 1


def _cold(x: Tensor) -> Tensor:
    return (x.sin() * 2).cos().sum()


def _traced(x: Tensor) -> Tensor:
    time.sleep(TRACE_S)
    return torch.sin(x)


def reproduce(*, guarded: bool, tracer: bool, phase_s: float = PHASE_S) -> Phase:
    """Runs one phase in this process. A naive one may leave the process damaged."""
    private.load_compiler()
    race = Race(GUARDED if guarded else NAIVE, tracer, phase_s)
    race.run()
    return Phase(
        torch=torch.__version__,
        guarded=guarded,
        tracer=tracer,
        calls=race.rounds.total(),
        failures=race.kinds.total(),
        kinds=dict(race.kinds.most_common()),
        compilations=race.rounds["compilation"],
        traces=race.rounds["trace"],
        left_on=hunt.stuck(),
    )


def reproduce_all(phase_s: float = PHASE_S) -> Iterator[Phase]:
    """All four phases, the guarded ones first, in processes without PyTorch settings in their environment.

    Raises:
        RuntimeError: a process died or hung; says what it said.
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "PYTORCH"))}
    for which in PROCESSES:
        command = [sys.executable, "-m", "draftsmith.compile.reproduce", which, "--seconds", str(phase_s)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, env=plain, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{which}: no end after {PROCESS_S:.0f} s") from None
        if done.returncode:
            raise RuntimeError(f"{which}: ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        yield from (Phase(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{"))


def main() -> None:
    """All phases, or those of one process; a JSON line each."""
    parser = argparse.ArgumentParser(prog="python -m draftsmith.compile.reproduce", description=__doc__)
    parser.add_argument("which", nargs="?", choices=["all", *PROCESSES], default="all")
    parser.add_argument("--seconds", type=float, default=PHASE_S, help=f"of each phase (default {PHASE_S:g})")
    options = parser.parse_args()
    which, phase_s = options.which, options.seconds
    torch.set_num_threads(1)
    if which == "all":
        phases = reproduce_all(phase_s)
    else:
        phases = (reproduce(guarded=g, tracer=t, phase_s=phase_s) for g, t in PROCESSES[which])
    for phase in phases:
        print(json.dumps(asdict(phase)), flush=True)


if __name__ == "__main__":
    main()
