"""A guarded function is called, copied and refused as a function is; a forked child compiles."""

import copy
import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.compile import guard, private
from draftsmith.compile.guard import UncompiledError


def test_an_argument_may_be_called_self() -> None:
    call = guard.compile(lambda self, x: self + x, backend="eager")
    assert call(self=torch.ones(1), x=torch.ones(1)) == 2


def test_it_is_a_method_where_it_stands_in_a_class() -> None:
    class Scale:
        factor = 3

        @guard.compile
        def apply(self, x: Tensor) -> Tensor:
            return x * self.factor

        by_name: Any = guard.compile(lambda self, x: x * self.factor, backend="eager")

    assert Scale().by_name(torch.ones(1)) == 3
    assert isinstance(Scale.apply, guard.Compiled)


def test_copies_are_the_same_object() -> None:
    call = guard.compile(lambda x: x + 1, backend="eager")
    assert copy.deepcopy({"attend": call})["attend"] is call


def test_what_cannot_be_compiled_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="takes a function or a module, not NoneType"):
        guard.compile(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compiled already"):
        guard.compile(guard.compile(torch.sin))
    with pytest.raises(ValueError, match="excluded from compilation"):
        guard.compile(torch.compiler.disable(lambda x: x))


def test_a_dispatch_mode_is_named() -> None:
    call = guard.compile(lambda x: x + 1, backend="eager")
    with FlopCounterMode(display=False), pytest.raises(UncompiledError, match="FlopCounterMode"):
        call(torch.ones(2))


def test_a_child_forked_while_another_thread_compiles_can_compile() -> None:
    compiling, go_on = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiling.set()
        go_on.wait(30)
        return graph.forward

    other, mine = guard.compile(lambda x: x * 2, backend=backend), guard.compile(lambda x: x + 1, backend="eager")
    thread = threading.Thread(target=lambda: other(torch.ones(2)), daemon=True)
    thread.start()
    assert compiling.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # instead of a child that waits for ever
        try:
            healthy = not private.damage(private.healthy_state())
            os._exit(0 if healthy and mine(torch.ones(2)).sum() == 4 else 1)
        finally:
            os._exit(2)
    go_on.set()
    thread.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
