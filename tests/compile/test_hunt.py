"""Who traced and who met it: both stacks on record, nothing else, and everything put back."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.fx
from torch import Tensor, nn

from draftsmith.compile import guard, hunt, private

WAIT_S = 30.0


@pytest.fixture
def recorder() -> Iterator[hunt.Recorder]:
    recorder = hunt.install()
    yield recorder
    recorder.uninstall()
    private.restore(private.healthy_state())


class Paused:
    """A thread that stands still inside `body`, where it calls what it was given, until `go_on`."""

    def __init__(self, name: str, body: Callable[[Callable[[], None]], object]) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(body,), name=name, daemon=True)
        self.thread.start()
        assert self.reached.wait(WAIT_S)

    def _run(self, body: Callable[[Callable[[], None]], object]) -> None:
        try:
            body(self._pause)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def _pause(self) -> None:
        self.reached.set()
        assert self.released.wait(WAIT_S)

    def go_on(self) -> None:
        self.released.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def trace_that_pauses(pause: Callable[[], None]) -> None:
    def traced(x: Tensor) -> Tensor:
        pause()
        return x + 1

    torch.fx.Tracer().trace(traced)


class Pausing(nn.Module):
    """Eager code that stands still."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self.pause = pause

    def forward(self, x: Tensor) -> Tensor:
        self.pause()
        return x


def model_that_pauses(pause: Callable[[], None]) -> None:
    Pausing(pause)(torch.zeros(1))


def in_thread(name: str, body: Callable[[], object]) -> None:
    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join(WAIT_S)


@pytest.mark.skipif(private.flag_is_thread_local(), reason="this torch has a flag per thread")
def test_a_compiled_call_beside_a_tracer_is_on_record_with_both_stacks() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.zeros(2))  # before the hunt: what is compiled already is watched, too
    refused: list[str] = []

    def calls_compiled_code() -> None:
        try:
            compiled(torch.zeros(2))
        except RuntimeError as error:
            refused.append(str(error))

    recorder = hunt.install()
    try:
        tracer = Paused("quantiser", trace_that_pauses)
        in_thread("drafter", calls_compiled_code)
        tracer.go_on()
    finally:
        recorder.uninstall()
    assert refused
    assert "symbolically trace" in refused[0]
    [(meeting, times)] = recorder.meetings.items()
    assert times == 1
    assert meeting.tracer is not None
    assert (meeting.tracer.thread, meeting.tracer.what) == ("quantiser", "Tracer.trace")
    assert any("trace_that_pauses" in line for line in meeting.tracer.lines)
    assert meeting.met.thread == "drafter"
    assert "calls_compiled_code" in meeting.met.lines[0]
    both = [line for line in recorder.report().splitlines() if "quantiser" in line and "drafter" in line]
    assert len(both) == 1, "the two stacks stand side by side"


@pytest.mark.parametrize("tracing", ["trace", "compilation"])
def test_an_eager_model_beside_a_trace_or_compilation_is_on_record(recorder: hunt.Recorder, tracing: str) -> None:
    if tracing == "compilation" and not private.is_compiling_is_process_wide():
        pytest.skip("in this torch eager code of other threads does not see a compilation")
    target = Paused("target", model_that_pauses)
    if tracing == "trace":
        torch.fx.Tracer().trace(lambda x: x + 1)
    else:
        torch.compile(lambda x: x + 2, backend="eager")(torch.zeros(2))
    target.go_on()
    assert target.error is None
    found = {(m.met.thread, m.met.what, m.tracer.what if m.tracer else None): n for m, n in recorder.meetings.items()}
    what = "Tracer.trace" if tracing == "trace" else "compilation"
    assert found[("target", "call of an eager model", what)] == 2  # when it started, and when it ended
    assert all("test_an_eager_model" in str(m.tracer) for m in recorder.meetings if m.tracer)
    assert recorder.traces + recorder.compilations >= 1


def test_who_waits_at_the_guard_has_met_nobody(recorder: hunt.Recorder) -> None:
    def waits_at_the_guard(pause: Callable[[], None]) -> None:
        class Guarded(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                pause()
                with guard.shared():
                    return x

        Guarded()(torch.zeros(1))

    waiting = Paused("target", waits_at_the_guard)
    with guard.exclusive("test"):
        waiting.released.set()
        while not any("wait_for_turn" in line for line in stack_of(waiting.thread)):
            pass
        torch.fx.Tracer().trace(lambda x: x + 1)
    waiting.go_on()
    assert recorder.traces == 1
    assert recorder.meetings == {}


def stack_of(thread: threading.Thread) -> list[str]:
    import sys
    import traceback

    return traceback.format_stack(sys._current_frames()[thread.ident or 0])


def test_two_tracers_meet(recorder: hunt.Recorder) -> None:
    first = Paused("first", trace_that_pauses)
    second = Paused("second", trace_that_pauses)
    second.go_on()  # in order: nothing stays on
    first.go_on()
    assert [(m.tracer.thread, m.met.thread) for m in recorder.meetings if m.tracer] == [("second", "first")]
    assert hunt.stuck() == []


def test_interleaved_traces_leave_the_process_damaged_and_that_is_recognised() -> None:
    """What naive threads do to each other for good: each puts back what it found, in the wrong order."""
    try:
        first = Paused("first", trace_that_pauses)
        second = Paused("second", trace_that_pauses)
        assert hunt.stuck() == [], "both are alive: this is a race, no damage yet"
        first.go_on()
        second.go_on()
        found = hunt.stuck()
        assert "nn.Module.__call__ is FX's patch" in found
        assert ("the FX tracing flag is on" in found) == (not private.flag_is_thread_local())
        with pytest.raises((NameError, RuntimeError)):
            nn.Linear(2, 2)(torch.zeros(1, 2))  # nobody traces, all threads have ended
    finally:
        private.restore(private.healthy_state())
    assert hunt.stuck() == []


def test_traces_that_take_the_guard_leave_no_damage() -> None:
    inside: list[str] = []

    def guarded(pause: Callable[[], None]) -> None:
        pause()
        with guard.exclusive("test"):
            inside.append("in")
            assert torch.fx.Tracer().trace(lambda x: x + 1)
            inside.append("out")

    threads = [Paused(name, guarded) for name in ("first", "second")]
    for thread in threads:
        thread.released.set()
    for thread in threads:
        thread.go_on()
        assert thread.error is None
    assert inside == ["in", "out", "in", "out"]
    assert hunt.stuck() == []


@pytest.mark.parametrize("field", ["fx_flag", "compiling_flag"])
def test_a_flag_left_on_is_recognised(field: str) -> None:
    healthy = private.healthy_state()
    values = {name: getattr(healthy, name) for name in healthy.__slots__}
    try:
        private.restore(private.TracingState(**values | {field: True}))
        assert len(hunt.stuck()) == 1
    finally:
        private.restore(healthy)
    assert hunt.stuck() == []


def test_a_call_that_meets_a_flag_left_on_is_on_record(recorder: hunt.Recorder) -> None:
    compiled = torch.compile(lambda x: x + 3, backend="eager")
    compiled(torch.zeros(2))
    healthy = private.healthy_state()
    private.restore(private.TracingState(True, False, healthy.module_call, healthy.module_getattr, None))
    with pytest.raises(RuntimeError, match="symbolically trace"):
        compiled(torch.zeros(2))
    assert "the FX tracing flag is on" in recorder.report()
    private.restore(healthy)
    assert [m.tracer for m in recorder.meetings] == [None]


def test_uninstall_puts_everything_back() -> None:
    question = torch.fx._symbolic_trace.is_fx_symbolic_tracing
    trace, code = torch.fx.Tracer.trace, question.__code__
    recorder = hunt.install()
    assert hunt.install() is recorder
    assert torch.fx.Tracer.trace is not trace
    recorder.uninstall()
    assert (torch.fx.Tracer.trace, question.__code__) == (trace, code)
    torch.compile(lambda x: x + 4, backend="eager")(torch.zeros(2))
    assert (recorder.traces, recorder.compilations) == (0, 0)
    again = hunt.install()
    assert again is not recorder
    again.uninstall()


@contextmanager
def watched() -> Iterator[hunt.Recorder]:
    recorder = hunt.install()
    try:
        yield recorder
    finally:
        recorder.uninstall()


def test_more_meetings_than_are_kept_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunt, "KEPT", 1)
    with watched() as recorder:
        targets = [Paused(f"target {n}", model_that_pauses) for n in range(3)]
        torch.fx.Tracer().trace(lambda x: x + 1)
        for target in targets:
            target.go_on()
    assert len(recorder.meetings) == 1
    assert sum(recorder.meetings.values()) + recorder.dropped == 6
    assert f"{recorder.dropped} meetings more" in recorder.report()


def test_a_hunt_that_cannot_be_installed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.fx.Tracer.trace

    def refuse(met: Callable[[], None]) -> Callable[[], None]:
        raise private.UnsupportedTorch("another version")

    monkeypatch.setattr(private, "watch_question", refuse)
    with pytest.raises(private.UnsupportedTorch):
        hunt.install()
    assert torch.fx.Tracer.trace is before
