"""Compiling ahead: every signature of a program, one after another, before there are threads to meet the compiler.

    warm_up([Signature("attention, cuda:0", lambda: attend(q, k, v).sum().backward())])

Afterwards `guard.count_compilations()` should stand still; whatever raises it was not foreseen.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from draftsmith.compile.guard import Compilation, process_guard


@dataclass(frozen=True, slots=True)
class Signature:
    """Something to compile: `run` calls guarded functions as the program will, with the backward if it has one."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Warmed:
    """What a signature took, and what the guard compiled for it."""

    name: str
    seconds: float
    compilations: tuple[Compilation, ...]

    @property
    def cache(self) -> str:
        """`miss` if anything was not in PyTorch's disk cache, else `off` or `hit`; `warm`: nothing was compiled."""
        words = {compilation.cache for compilation in self.compilations}
        return next((word for word in ("miss", "off", "hit") if word in words), "warm")


def warm_up(signatures: Iterable[Signature], done: Callable[[Warmed], None] | None = None) -> tuple[Warmed, ...]:
    """Runs each signature and says what was compiled.

    Args:
        signatures: in the order they are run; call this before other threads exist.
        done: called after each, for a display.

    Raises:
        Exception: whatever a signature raises. What cannot be compiled now cannot be later.
    """
    results = []
    for signature in signatures:
        result = _run(signature)
        results.append(result)
        if done is not None:
            done(result)
    return tuple(results)


def _run(signature: Signature) -> Warmed:
    guard = process_guard()
    known, began = len(guard.compilations), time.perf_counter()
    signature.run()
    return Warmed(signature.name, time.perf_counter() - began, tuple(guard.compilations[known:]))
