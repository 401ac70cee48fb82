"""Checks of this installation and process. None needs a config."""

import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from draftsmith.compile import guard, private
from draftsmith.compile.damage import find_damage, find_unreadable
from draftsmith.compile.reproduce import Phase, reproduce_all
from draftsmith.doctor.check import Check, Subject
from draftsmith.doctor.code import observe

GUARD = "in draftsmith the compile guard keeps them apart; in your own code use it as docs/compile-race.md shows"
DRIVER = Path("/proc/driver/nvidia/version")
WAIT_S = 20.0
HAZARDS = (  # (from, below, what it does)
    ((2, 11), (2, 13), "warm compiled calls of other threads raise while one thread compiles"),
    ((2, 11), (2, 14), "warm compiled calls of other threads raise while one thread traces with FX"),
    ((2, 13), (2, 16), "eager models of other threads read that they are being compiled while one thread compiles"),
)


def versions(subject: Subject) -> Check:
    """Are these versions known to work together?"""
    name = "versions"
    found = {package: _version(package) for package in ("torch", "transformers", "triton")}
    driver = DRIVER.read_text().splitlines()[0].strip() if DRIVER.is_file() else "no NVIDIA driver"
    evidence = ", ".join([*(f"{package} {version or 'missing'}" for package, version in found.items()), driver])
    low, high = private.TESTED
    ours = private.version()
    if not low <= ours < high:
        supported = f"torch >={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        return Check(name, "fail", f"{evidence}; the guard does not know this torch", f"install {supported}")
    if torch.version.cuda and DRIVER.is_file() and not torch.cuda.is_available():
        remedy = f"update the driver, or install a torch for an older CUDA than {torch.version.cuda}"
        return Check(name, "fail", f"{evidence}; this torch cannot use the driver", remedy)
    if torch.cuda.is_available() and found["triton"] is None:
        return Check(name, "fail", f"{evidence}; flex attention cannot be compiled without triton", "install triton")
    hazards = [text for since, below, text in HAZARDS if since <= ours < below]
    if hazards:
        return Check(name, "warn", f"{evidence}; known of this torch: {'; '.join(hazards)}", GUARD)
    return Check(name, "ok", f"{evidence}; no bad pair is known")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def shared_state(subject: Subject) -> Check:
    """Measured: what does this thread see while another one traces, and while it compiles?"""
    before = private.tracing_state()
    with _while_another(_traces) as reached:
        traced = private.damage(before) if reached else []
    with _while_another(_compiles) as reached:
        told = {True: "yes", False: "no"}[torch.compiler.is_compiling()] if reached else "not measured (it is off)"
    evidence = (
        f"the FX tracing flag of torch {torch.__version__} is "
        f"{'thread-local' if private.flag_is_thread_local() else 'process-wide'}; while another thread traced, this "
        f"one saw: {'; '.join(traced) or 'nothing'}; is_compiling() here while another compiled: {told}"
    )
    if traced or told == "yes":
        return Check("state across threads", "warn", evidence, GUARD)
    return Check("state across threads", "ok", evidence)


@contextmanager
def _while_another(body: Callable[[Callable[[], None]], object]) -> Iterator[bool]:
    """Another thread stands still inside `body`, where it calls what it was given. Yields whether it got there.

    It is alone in the guard; this thread only looks.
    """
    reached, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        reached.set()
        go_on.wait(WAIT_S)

    def run() -> None:
        with guard.exclusive("the doctor measures what threads share"):
            body(pause)

    thread = threading.Thread(target=run, name="doctor", daemon=True)
    thread.start()
    try:
        while not reached.wait(0.02) and thread.is_alive():
            pass
        yield reached.is_set()
    finally:
        go_on.set()
        thread.join(WAIT_S)


def _traces(pause: Callable[[], None]) -> None:
    def traced(x: Tensor) -> Tensor:
        pause()
        return x + 1

    torch.fx.Tracer().trace(traced)


def _compiles(pause: Callable[[], None]) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        pause()
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1))


def block_mask(subject: Subject) -> Check:
    """Does `create_block_mask` trace, or leave tracing on?"""
    name = "create_block_mask"
    before = private.tracing_state()
    with guard.shared():
        seen = observe(lambda: create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu"))
    left = private.damage(before)
    evidence = f"called once: {seen['a symbolic trace']} traces, afterwards {'; '.join(left) or 'all state as before'}"
    if left:
        return Check(name, "fail", evidence, "restart the process; report this version to PyTorch")
    if seen["a symbolic trace"]:
        return Check(name, "warn", evidence, "build block masks inside guard.exclusive()")
    return Check(name, "ok", evidence)


def compiler_cache(subject: Subject) -> Check:
    """Is there anything in the compiler's cache directory that cannot be loaded?"""
    name, directory = "compiler cache", private.cache_directory()
    if not directory.exists():
        return Check(name, "ok", f"{directory} does not exist: the first compilation of each signature is cold")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        remedy = "give this user the rights, or set TORCHINDUCTOR_CACHE_DIR to a directory of its own"
        return Check(name, "fail", f"{directory} cannot be read and written", remedy)
    files = [path for path in directory.rglob("*") if path.is_file()]
    size = f"{directory}: {len(files)} files, {sum(path.stat().st_size for path in files) / 2**20:.1f} MiB"
    damage = [*find_damage(directory), *find_unreadable(directory)]
    if damage:
        shown = "; ".join(damage[:3]) + (f"; {len(damage) - 3} more" if len(damage) > 3 else "")
        return Check(name, "fail", f"{size}; damaged: {shown}", "draftsmith cache clear; signatures are compiled again")
    return Check(name, "ok", f"{size}; every library, Python file and entry is whole")


def left_on(subject: Subject) -> Check:
    """Was tracing on in this process, with nobody in it, when the doctor came?"""
    name = "state left on"
    if subject.left_on:
        remedy = "restart the process: compiled code of this one raises, or runs as it is, from now on"
        return Check(name, "fail", f"{'; '.join(subject.left_on)}; no thread traces or compiles", remedy)
    threads = threading.active_count()
    return Check(name, "ok", f"flags off, no FX patch on nn.Module; looked at the stacks of {threads} threads")


def fallback_settings(subject: Subject) -> Check:
    """Is PyTorch told to run code as it is where it should be compiled?"""
    name = "settings that force a fallback"
    found = private.fallback_settings()
    if found:
        remedy = "undo these settings, also in the environment: flex attention runs dense with them, or not at all"
        return Check(name, "fail", "; ".join(found), remedy)
    looked = "disable, suppress_errors, error_on_nested_fx_trace, the stance, flex attention's debug switch"
    return Check(name, "ok", f"none of {looked} is set, as seen from {threading.current_thread().name}")


def reproduction(subject: Subject) -> Check:
    """The race itself, in processes of its own: naive threads, and the same threads under the guard."""
    name = "live reproduction"
    try:
        phases = list(reproduce_all())
    except RuntimeError as error:
        return Check(name, "fail", str(error), "run python -m draftsmith.compile.reproduce and report what it prints")
    evidence = "; ".join(map(_phase, phases))
    if any(phase.failures or phase.left_on for phase in phases if phase.guarded):
        return Check(name, "fail", evidence, "the guard does not hold here: do not train with threads; report this")
    if any(phase.failures or phase.left_on for phase in phases):
        return Check(name, "warn", evidence, GUARD)
    return Check(name, "ok", evidence)


def _phase(phase: Phase) -> str:
    who = f"{'guarded' if phase.guarded else 'naive'} threads, one compiles{' and one traces' if phase.tracer else ''}"
    worst = f" (most: {next(iter(phase.kinds))})" if phase.kinds else ""
    stays = f", left behind: {', '.join(phase.left_on)}" if phase.left_on else ""
    return f"{who}: {phase.failures} failures of {phase.calls} calls{worst}{stays}"
