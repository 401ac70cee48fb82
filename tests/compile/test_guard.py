"""The guard: warm calls never trace, cold ones are alone, nothing runs uncompiled, and tracing leaves nothing on.

The cheap backend `aot_eager` traces as the real one does and generates no code, so these tests need no C++ compiler.
"""

import ctypes
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.compile import guard, private
from draftsmith.compile.guard import Guard, RecompileLimitError, UncompiledError


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    healthy = private.tracing_state()
    yield
    assert private.damage(healthy) == []
    assert guard.process_guard().inside() == []


def waves(x: Tensor, scale: float = 1.0) -> Tensor:
    return (x.sin() * scale).sum()


def compiled(function: Callable[..., Any] = waves, **options: Any) -> Any:
    return guard.compile(function, **{"backend": "aot_eager", **options})


def in_threads(*bodies: Callable[[], None]) -> None:
    """Runs all; the first error of any is raised here."""
    errors: list[BaseException] = []

    def caught(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "hangs"
    if errors:
        raise errors[0]


def test_one_graph_per_signature_and_a_record_of_each() -> None:
    call, before = compiled(), len(guard.process_guard().compilations)
    for size in (2, 3, 2, 3, 3):
        assert torch.equal(call(torch.arange(size) * 1.0, scale=2.0), waves(torch.arange(size) * 1.0, 2.0))
    new = guard.process_guard().compilations[before:]
    assert [c.signature for c in new] == ["float32[2]@cpu, scale=2.0", "float32[3]@cpu, scale=2.0"]
    assert {c.name for c in new} == {"waves"}
    assert all(c.seconds > 0 for c in new)


def test_warm_calls_do_not_trace_and_run_together() -> None:
    """Four threads are inside the compiled code at once, which one lock around everything would not allow."""
    together, meet = threading.Barrier(4), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *values: (together.wait(10) if meet.is_set() else None, graph(*values))[1]

    call, x = compiled(backend=backend), torch.ones(3)
    call(x)
    meet.set()
    compilations = guard.count_compilations()
    in_threads(*[lambda: call(x)] * 4)
    assert guard.count_compilations() == compilations


def test_compilations_are_counted_after_a_reset_too() -> None:
    call = compiled()
    torch._dynamo.reset()  # as others do it; here nobody else is inside
    before = guard.count_compilations()
    call(torch.ones(7))
    assert guard.count_compilations() - before == 1


def test_simultaneous_first_calls_compile_once() -> None:
    call, before = compiled(), guard.count_compilations()
    start, results = threading.Barrier(8), list[Tensor]()

    def body() -> None:
        start.wait(10)
        results.append(call(torch.ones(5)))

    in_threads(*[body] * 8)
    assert len(results) == 8
    assert guard.count_compilations() - before == 1


def test_more_signatures_than_pytorchs_limit_from_a_worker_thread() -> None:
    """PyTorch's own limit is 8, after which it runs plain Python; its configuration is per thread since 2.12."""
    call = compiled()
    in_threads(lambda: [call(torch.ones(size)) for size in range(1, 13)] and None)
    assert call(torch.ones(12)) == waves(torch.ones(12))


def test_the_limit_is_an_error_and_each_function_has_its_own() -> None:
    first, second = compiled(recompile_limit=2), compiled(recompile_limit=2)
    for size in (1, 2):
        first(torch.ones(size)), second(torch.ones(size))
    with pytest.raises(RecompileLimitError, match="waves has more than 2 signatures"):
        first(torch.ones(3))
    assert first(torch.ones(2)) == waves(torch.ones(2))


@pytest.mark.parametrize("change", ["autocast", "dtype", "grad"])
def test_a_recompilation_that_nobody_foresaw_is_retried_alone(change: str) -> None:
    seen, weight = list[bool](), torch.ones(2, 2)

    def compiles_alone(graph: Any, inputs: Any) -> Any:
        seen.append(guard.process_guard()._gate.writer is guard.process_guard()._gate.mine())
        return graph

    spy = compiled(lambda x: (x @ x.T).sum() + torch.ones(1), backend=compiles_alone)
    with torch.no_grad():
        spy(weight)
    default = torch.get_default_dtype()
    try:
        if change == "autocast":
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                spy(weight)
        elif change == "dtype":
            torch.set_default_dtype(torch.float64)
            with torch.no_grad():
                spy(weight)
        else:
            spy(weight.clone().requires_grad_())
    finally:
        torch.set_default_dtype(default)
    assert seen == [True, True]


def test_what_must_be_compiled_never_runs_as_plain_python() -> None:
    ran = []

    def work(x: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            ran.append(x)
        return x + 1

    call = compiled(work)
    with torch.compiler.set_stance("force_eager"), pytest.raises(UncompiledError, match="work ran uncompiled"):
        call(torch.ones(2))
    with torch._dynamo.config.patch(disable=True), pytest.raises(UncompiledError, match="TORCHDYNAMO_DISABLE"):
        compiled(work)(torch.ones(2))
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        compiled(lambda x: x + 1 if x.sum() > 0 else x)(torch.ones(2))
    assert ran == []


def test_the_functions_own_errors_come_through() -> None:
    def work(x: Tensor) -> Tensor:
        return x.view(7)

    with pytest.raises(Exception, match="7"):
        compiled(work)(torch.ones(3))
    with pytest.raises(ValueError, match="compiled already"):
        guard.compile(torch.compile(waves))
    with pytest.raises(ValueError, match="fullgraph is always on"):
        guard.compile(waves, fullgraph=False)


def test_guarded_functions_inside_each_other_are_one_graph() -> None:
    inner, before = compiled(), guard.count_compilations()
    outer = compiled(lambda x: inner(x) * 2)
    assert outer(torch.ones(4)) == waves(torch.ones(4)) * 2
    assert guard.count_compilations() - before == 1


def test_modules_compile_too() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    assert torch.allclose(compiled(model)(torch.ones(2, 3)), model(torch.ones(2, 3)))


def test_backward_is_compiled_with_the_forward_and_runs_on_any_thread() -> None:
    """A backward that is compiled late would be compiled on autograd's thread, outside any hold."""
    call, x = compiled(lambda x: (x * x.sin()).sum()), torch.arange(3.0).requires_grad_()
    out = call(x)
    compilations = guard.count_compilations()
    with guard.exclusive("as if another thread compiled"):
        in_threads(lambda: out.backward())
    assert guard.count_compilations() == compilations
    wanted = torch.arange(3.0)
    assert x.grad is not None
    assert torch.allclose(x.grad, wanted.sin() + wanted * wanted.cos())


def test_eager_modules_are_safe_beside_a_tracer_that_takes_the_guard() -> None:
    """FX patches nn.Module.__call__ for all threads while it traces."""
    model, traced = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x, tracing, release = torch.ones(1, 2), threading.Event(), threading.Event()
    wanted = model(x)

    class Slow(torch.fx.Tracer):
        def call_module(self, *args: Any) -> Any:
            tracing.set()
            release.wait(10)
            return super().call_module(*args)

    def trace() -> None:
        with guard.exclusive("tracing"):
            nodes = Slow().trace(traced).nodes
            assert [n.op for n in nodes] == ["placeholder", "call_module", "call_module", "output"]

    def call() -> None:
        assert tracing.wait(10)
        threading.Timer(0.2, release.set).start()
        with guard.shared():
            assert torch.equal(model(x), wanted)

    in_threads(trace, call)


def test_compilations_that_do_not_know_the_guard_are_alone_too() -> None:
    """Eager code under the guard must not see `is_compiling()`, whoever compiles; transformers' models ask it."""
    guard.install()
    done, asked, seen = threading.Event(), 0, 0
    others = torch.compile(lambda x: x.sin().sum(), backend="aot_eager", dynamic=False)

    def compile_all_the_time() -> None:
        with torch._dynamo.config.patch(recompile_limit=100):
            for size in range(2, 22):
                others(torch.ones(size))
        done.set()

    def ask() -> None:
        nonlocal asked, seen
        while not done.is_set():
            with guard.shared():
                for _ in range(50):
                    asked, seen = asked + 1, seen + torch.compiler.is_compiling()
                    time.sleep(0)

    before = guard.count_compilations()
    in_threads(compile_all_the_time, ask)
    assert guard.count_compilations() - before == 20
    assert asked >= 1000
    assert seen == 0


def test_a_failed_tracing_is_put_back() -> None:
    healthy = private.tracing_state()

    def damage() -> None:
        with guard.exclusive("tracing"):
            nn.Module.__call__ = lambda *a, **k: None  # type: ignore[method-assign,assignment]
            torch.compiler._is_compiling_flag = True
            if not private.flag_is_thread_local():
                private._symbolic_trace._is_fx_tracing_flag = True
            assert len(private.damage(healthy)) >= 2
            raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        damage()
    assert private.damage(healthy) == []


def test_an_asynchronous_exception_in_the_compiling_thread() -> None:
    """At twelve instants of a compilation. The others go on, and compile the same signature afterwards."""

    class Stop(Exception):
        pass

    healthy, x = private.tracing_state(), torch.ones(3)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    interrupted = 0
    for instant in range(12):
        call, ended = compiled(model), list[BaseException | None]()

        def compiling(call: Any = call, ended: list[BaseException | None] = ended) -> None:
            try:
                call(x)
                ended.append(None)
            except BaseException as error:  # noqa: BLE001
                ended.append(error)

        thread = threading.Thread(target=compiling, daemon=True)
        thread.start()
        time.sleep(0.004 * instant)
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stop))
        thread.join(30)
        assert not thread.is_alive()
        interrupted += ended != [None]
        assert private.damage(healthy) == []
        in_threads(lambda: None, lambda call=call: call(x))  # type: ignore[misc]
        with guard.shared():
            assert torch.allclose(call(x), model(x))
    assert interrupted >= 3


def test_small_switch_intervals() -> None:
    """`fullgraph=True` calls of warm code give spurious errors beside others on 2.13 and 2.14; ours must not."""
    call, interval = compiled(), sys.getswitchinterval()
    inputs = [torch.ones(size) for size in (1, 2, 3)]
    wanted = [call(x) for x in inputs]
    end = time.monotonic() + 1.5

    def body() -> None:
        while time.monotonic() < end:
            for x, value in zip(inputs, wanted, strict=True):
                assert call(x) == value

    sys.setswitchinterval(1e-6)
    try:
        in_threads(*[body] * 4)
    finally:
        sys.setswitchinterval(interval)


def test_holds_of_its_own_guard_have_a_time_limit() -> None:
    own = Guard(time_limit_s=0.1)
    with own.exclusive("compiling for ever"), pytest.raises(guard.GateTimeout, match="compiling for ever"):
        in_threads(lambda: own.shared().__enter__())
    own.time_limit_s = 7.0
    assert own.time_limit_s == 7.0


def fresh_process(program: str) -> None:
    """Runs a program in a process of its own: what it breaks takes nobody along."""
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-1500:]


def test_first_use_from_many_threads_and_reset_beside_callers() -> None:
    """The compiler's first import by several threads deadlocks; torch._dynamo.reset beside callers crashes."""
    fresh_process(
        """
        import threading, torch
        from draftsmith.compile import guard
        start, errors, done = threading.Barrier(4), [], threading.Event()
        def body():
            try:
                start.wait(30)
                call = guard.compile(lambda x: x.sin() + 1, backend="aot_eager")
                while not done.is_set():
                    assert torch.allclose(call(torch.ones(3)), torch.ones(3).sin() + 1)
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=body) for _ in range(4)]
        for thread in threads: thread.start()
        for _ in range(10): guard.reset()
        done.set()
        for thread in threads: thread.join()
        assert not errors, errors
        """
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the compiler's processes in /proc")
def test_sigkill_of_the_compilers_processes() -> None:
    """Whatever the compiling thread makes of it, the others get in or get an error within the time limit."""
    fresh_process(
        """
        import os, pathlib, signal, tempfile, threading, time, torch
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
        from draftsmith.compile import guard, private
        LIMIT_S, outcome = 15.0, []
        guard.process_guard().time_limit_s = LIMIT_S
        call, healthy = guard.compile(lambda x: x.sin() + 1), private.tracing_state()

        def children(pid):
            try:
                for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                    for child in (task / "children").read_text().split():
                        yield from children(child)
                        yield int(child)
            except FileNotFoundError:  # ended meanwhile
                return

        def compiling():
            try:
                outcome.append(call(torch.ones(3)))
            except Exception as error:
                outcome.append(error)

        def kill():
            killed, end = 0, time.monotonic() + 60
            while not outcome and time.monotonic() < end:
                for child in list(children(os.getpid())):
                    try:
                        os.kill(child, signal.SIGKILL)
                        killed += 1
                    except ProcessLookupError:
                        pass
                time.sleep(0.02)
            return killed

        threading.Thread(target=compiling, daemon=True).start()
        while not guard.process_guard().inside() and not outcome:
            time.sleep(0.001)
        waited = []
        def other():
            began = time.monotonic()
            try:
                with guard.shared():
                    pass
            except guard.GateTimeout:
                pass
            waited.append(time.monotonic() - began)
        beside = threading.Thread(target=other)
        beside.start()
        assert kill() > 0, "no process of the compiler was seen"
        beside.join(LIMIT_S + 10)
        assert waited and waited[0] < LIMIT_S + 5, waited
        assert isinstance(outcome[0], Exception), outcome
        assert private.damage(healthy) == []
        assert torch.allclose(call(torch.ones(3)), torch.ones(3).sin() + 1)
        """
    )
