"""Many threads, one compiler: what may compile runs alone, what is warm runs together.

PyTorch's compiler keeps process-wide state while it traces, so compiled calls of other threads fail or run eagerly,
and eager models read a wrong `torch.compiler.is_compiling()` (docs/compile-race.md). The guard keeps them apart:

    from draftsmith.compile import guard

    attend = guard.compile(flex_attention)      # call it from any thread
    with guard.shared():                        # around eager model code
        hidden = model(tokens)
    with guard.exclusive("exporting"):          # around other tracers: torch.export, torch.fx, make_fx
        program = torch.export.export(model, (tokens,))
    guard.install()                             # other people's torch.compile is alone from now on, too

Never hold it around `backward()`: recomputation enters the guard from autograd's own thread.
"""

import logging
import os
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.compile import private
from draftsmith.compile.cache import CompilerCache
from draftsmith.compile.gate import Gate, GateTimeout, Hold

TIME_LIMIT_S = 900.0  # longer than the slowest compilation that we have seen, by far
RECOMPILE_LIMIT = 256  # signatures per guarded function; PyTorch's own 8 is too few for eight GPUs

log = logging.getLogger("draftsmith.compile")


class UncompiledError(RuntimeError):
    """A function that must run compiled ran as plain Python; refused before its first operation."""


class RecompileLimitError(RuntimeError):
    """A function has more signatures than its limit allows."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A signature that was compiled."""

    name: str  # of the function
    signature: str
    thread: str
    seconds: float
    cache: str  # "hit", "miss" (of PyTorch's disk cache) or "off"


class Guard:
    """One per process; see `guard` below. Threads share it.

    Promises: whatever may trace runs while no other thread is inside compiled code, eager model code under `shared`,
    or another tracer. Compiled calls that are warm never trace: they look up and run. If a compilation ends in an
    exception, the process-wide tracing state is put back as it was before.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._gate = Gate(time_limit_s)
        self._count = 0
        self._installed = False
        self.compilations: list[Compilation] = []  # by guarded functions, in order
        self.cache = CompilerCache()

    @property
    def time_limit_s(self) -> float:
        """Seconds that a thread waits for another before it raises `GateTimeout`."""
        return self._gate.time_limit_s

    @time_limit_s.setter
    def time_limit_s(self, seconds: float) -> None:
        self._gate.time_limit_s = seconds

    def shared(self) -> Hold:
        """Context manager around eager model code. Re-entrant; cheap."""
        return self._gate.mine()

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Context manager for what traces: nobody else is inside. Re-entrant, also from inside `shared`.

        Args:
            what: a few words for those who wait too long.

        Raises:
            GateTimeout: others stayed inside for longer than the time limit.
        """
        with self._gate.exclusive(what):
            before = private.tracing_state()
            try:
                yield
            except BaseException:
                for harm in private.damage(before):
                    log.warning("%s failed and left tracing on: %s; put back", what, harm)
                private.restore(before)
                raise

    def compile(
        self, function: Callable[..., Any], *, recompile_limit: int = RECOMPILE_LIMIT, **options: Any
    ) -> "Compiled":
        """A compiled `function` that many threads may call.

        It always compiles whole (`fullgraph`) and for fixed shapes unless `dynamic=True` is given. Each call of this
        method makes compiled code of its own, with a limit of its own.

        Args:
            function: anything that `torch.compile` takes, not yet compiled.
            recompile_limit: signatures (shapes, dtypes, devices, grad mode, …) before `RecompileLimitError`.
            options: of `torch.compile`, but not `fullgraph`.

        Raises:
            TypeError: it cannot be called.
            ValueError: the function is compiled already, or excluded from compilation.
            UnsupportedTorch: the guard does not know this version.
        """
        self.install()
        with self.exclusive("making a compiled function"):
            private.load_code_generator()
            return Compiled(self, function, recompile_limit, options)

    def install(self) -> None:
        """From now on every compilation of the process is alone and counted, also of code that does not know the guard.

        Loads the compiler, which several threads must not do at once. More calls do nothing.

        Raises:
            UnsupportedTorch: the guard does not know this version.
        """
        with self.exclusive("loading the compiler"):
            if not self._installed:
                private.load_compiler()
                private.compile_alone(self.exclusive, self._counted)
                self._installed = True

    def count_compilations(self) -> int:
        """Compilations of the whole process since `install`, guarded or not."""
        return self._count

    def reset(self) -> None:
        """Forgets all compiled code of the process, alone, because `torch.compiler.reset` crashes beside callers."""
        self.install()
        with self.exclusive("resetting the compiler"):
            private.reset_compiler()

    def inside(self) -> list[str]:
        """Names of the threads that are inside now."""
        return self._gate.inside()

    def after_fork(self) -> None:
        """In a forked child: what other threads held is free, and what one of them traced is switched off."""
        if self._gate.forget_other_threads():
            private.restore(private.healthy_state())
            private.free_compile_lock()

    def _counted(self) -> None:
        self._count += 1  # callbacks come one at a time, under a lock of PyTorch's


class Compiled:
    """A guarded function. Calls that are warm run together; a call that must compile is alone.

    A warm call looks its signature up in what is compiled and never traces. If nothing fits, the plain function is
    entered and refuses at its first line; the call is then retried alone, where it may compile. So a recompilation
    that nobody foresaw costs one refused call, and a region that must be compiled never runs as plain Python.
    Like a function it is the same object in every copy, and a method where it stands in a class.
    """

    def __init__(self, guard: Guard, function: Callable[..., Any], limit: int, options: dict[str, Any]) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function):
            raise TypeError(f"guard.compile takes a function or a module, not {name}")
        if getattr(function, "_torchdynamo_disable", False):
            raise ValueError(f"{name} is excluded from compilation (torch.compiler.disable); give the plain function")
        if (
            isinstance(function, Compiled)
            or hasattr(function, "_torchdynamo_orig_callable")
            or hasattr(function, "_orig_mod")
        ):
            raise ValueError(f"{name} is compiled already; give guard.compile the plain function")
        if "fullgraph" in options:
            raise ValueError(f"{name}: fullgraph is always on under the guard; leave it out")
        self.name, self.recompile_limit = name, limit
        self._guard, self._function = guard, function
        self._core = _own_code(_must_compile(self, function), name)
        self._warm = private.run_only(self._core)
        self._cold = torch.compile(self._core, fullgraph=True, **{"dynamic": False, **options})

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Compiled":
        return self

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # inside another compiled function: one graph
            return self._function(*args, **kwargs)
        with self._guard.shared():
            try:
                return self._warm(*args, **kwargs)
            except _Missed as miss:
                if miss.compiled is not self:
                    raise
        return self._compile(args, kwargs)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._guard.exclusive(f"compiling {self.name}"):
            try:
                return self._warm(*args, **kwargs)  # another thread may have compiled it while we waited
            except _Missed as miss:
                if miss.compiled is not self:
                    raise
            began, caches = time.perf_counter(), private.cache_counters()
            try:
                with private.compile_settings(self.recompile_limit):
                    out = self._guard.cache.run(lambda: self._cold(*args, **kwargs))
            except _Missed:
                raise UncompiledError(
                    f"{self.name} ran uncompiled, which was refused: the compiler is switched off "
                    "(TORCHDYNAMO_DISABLE, torch.compiler.set_stance), a TorchDispatchMode such as FlopCounterMode is "
                    "on, or a tracer is open: this thread's, or one outside the guard"
                ) from None
            except Exception as error:
                if private.is_limit_error(error):
                    raise RecompileLimitError(
                        f"{self.name} has more than {self.recompile_limit} signatures, the limit; pad its shapes, "
                        "or raise recompile_limit"
                    ) from error
                raise
            compilation = Compilation(
                name=self.name,
                signature=describe(args, kwargs),
                thread=threading.current_thread().name,
                seconds=time.perf_counter() - began,
                cache=_cache_word(caches, private.cache_counters()),
            )
            self._guard.compilations.append(compilation)
            self._guard.cache.note(self.name, compilation.signature, compilation.seconds, compilation.cache == "miss")
            return out


class _Missed(Exception):
    """Plain Python was entered where compiled code should run."""

    def __init__(self, compiled: Compiled) -> None:
        super().__init__(compiled.name)
        self.compiled = compiled


def _must_compile(compiled: Compiled, function: Callable[..., Any]) -> types.FunctionType:
    def core(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # a constant in compiled code
            raise _Missed(compiled)
        return function(*args, **kwargs)

    assert isinstance(core, types.FunctionType)
    return core


def _own_code(function: types.FunctionType, name: str) -> types.FunctionType:
    """A copy with a code object of its own: compiled code and the recompile limit belong to the code object."""
    code = function.__code__.replace(co_name=f"guarded_{name}")
    copy = types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)
    return copy


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A signature for people: `float32[2, 8]@cpu grad, …`."""
    named = [_word(value) for value in args] + [f"{name}={_word(value)}" for name, value in kwargs.items()]
    return ", ".join(named) + ("" if torch.is_grad_enabled() else "; no grad")


def _word(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)}@{value.device}{' grad' if value.requires_grad else ''}"
    if isinstance(value, int | float | bool | str | None):
        return repr(value)
    return type(value).__name__


def _cache_word(before: dict[str, int], after: dict[str, int]) -> str:
    if after["miss"] > before["miss"]:
        return "miss"
    return "hit" if after["hit"] > before["hit"] else "off"


_process = Guard()
"""The guard of this process. Two guards would be none."""

os.register_at_fork(after_in_child=_process.after_fork)

shared, exclusive, compile, install = _process.shared, _process.exclusive, _process.compile, _process.install
count_compilations, reset = _process.count_compilations, _process.reset


def process_guard() -> Guard:
    """The one that the functions of this module use: its time limit, its compilations, who is inside."""
    return _process


__all__ = ["Compilation", "Compiled", "GateTimeout", "Guard", "RecompileLimitError", "UncompiledError"]
__all__ += ["compile", "count_compilations", "exclusive", "install", "process_guard", "reset", "shared"]
