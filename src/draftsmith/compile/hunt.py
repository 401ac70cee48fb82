"""Who held a tracer open when another thread called a model or compiled code? Both stacks, side by side.

    from draftsmith.compile import hunt
    recorder = hunt.install()
    ...                              # the program that fails
    print(recorder.report())

It costs nothing per model call, 3 to 5 % of the cheapest call of compiled code, and 100 to 300 µs per trace.
"""

import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from types import FrameType
from typing import Any

import torch
import torch.fx
from torch import nn

from draftsmith.compile import private
from draftsmith.compile.gate import Gate

STACK_LINES = 10  # of each side
PLUMBING = ("torch/", "threading.py")  # frames that say nothing about the program; the innermost two are kept
KEPT = 200  # different meetings; more are counted, not kept

_trace = torch.fx.Tracer.trace  # the original: its code object shows that a thread is inside
_WAITS = {Gate.wait_for_turn.__code__, Gate._acquire.__code__}
_MODULE_CALL = {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a thread was: `file:line function`, the innermost first."""

    thread: str
    what: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """A thread that was inside a model or compiled code while another traced. `tracer` is None if nobody traced: the
    flag was left on."""

    tracer: Stack | None
    met: Stack


class Recorder:
    """What `install` returns. One per process.

    Promises: a call of compiled code that is told "FX traces" is always recorded, with the live tracers. Eager models
    and calls already inside are sampled when a trace or compilation starts and when it ends. A thread that waits at
    the compile guard has met nobody.
    Locks: `_lock` guards what is recorded; `_live` is written by each thread for itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[int, list[Stack]] = {}
        self._compiling: Stack | None = None
        self._meetings: Counter[Meeting] = Counter()
        self._undo: list[Callable[[], None]] = []
        self.traces = self.compilations = self.dropped = 0
        self.cost_s = 0.0  # spent recording, all threads together, without what each compiled call adds

    @property
    def meetings(self) -> dict[Meeting, int]:
        """Each with how often it was seen."""
        with self._lock:
            return dict(self._meetings)

    def uninstall(self) -> None:
        """Puts everything back. What was recorded stays readable."""
        global _installed
        while self._undo:
            self._undo.pop()()
        if _installed is self:
            _installed = None

    def report(self) -> str:
        """For people: totals, then every meeting with both stacks, the most frequent first."""
        found = sorted(self.meetings.items(), key=lambda pair: -pair[1])
        head = f"{self.traces} traces, {self.compilations} compilations, {sum(n for _, n in found)} meetings"
        more = [f"{self.dropped} meetings more, beyond the {KEPT} that are kept"] if self.dropped else []
        left_on = [f"left on, and nobody traces: {words}" for words in stuck()]
        return "\n\n".join([head, *(_side_by_side(m, n) for m, n in found), *more, *left_on])

    def _install(self) -> None:
        recorder = self

        @functools.wraps(_trace)
        def trace(tracer: torch.fx.Tracer, *args: Any, **kwargs: Any) -> Any:
            with recorder._inside(f"{type(tracer).__name__}.trace", sys._getframe(1)):
                return _trace(tracer, *args, **kwargs)

        torch.fx.Tracer.trace = trace  # type: ignore[method-assign, assignment]
        self._undo.append(lambda: setattr(torch.fx.Tracer, "trace", _trace))
        private.load_compiler()
        self._undo.append(private.watch_question(self._told_yes))
        self._undo.append(private.watch_compilations(self._compilation_starts, self._compilation_ends))

    def _inside(self, what: str, frame: FrameType) -> "_Inside":
        return _Inside(self, _stack(threading.current_thread().name, what, frame))

    def _enter(self, mine: Stack) -> None:
        began, me = time.perf_counter(), threading.get_ident()
        others = [stacks[-1] for ident, stacks in list(self._live.items()) if ident != me]
        self._live.setdefault(me, []).append(mine)
        found = [Meeting(mine, other) for other in others]
        self._note([*found, *self._met(mine, compiled=not private.flag_is_thread_local())])
        with self._lock:
            self.traces += 1
            self.cost_s += time.perf_counter() - began

    def _leave(self, mine: Stack) -> None:
        began, me = time.perf_counter(), threading.get_ident()
        self._note(self._met(mine, compiled=not private.flag_is_thread_local()))
        self._live[me].pop()
        if not self._live[me]:
            del self._live[me]
        with self._lock:
            self.cost_s += time.perf_counter() - began

    def _compilation_starts(self) -> None:
        frame = sys._getframe(1)
        self._compiling = _stack(threading.current_thread().name, "compilation", _outside_compiler(frame))
        with self._lock:
            self.compilations += 1
        self._sample_models()

    def _compilation_ends(self) -> None:
        self._sample_models()
        self._compiling = None

    def _sample_models(self) -> None:
        """Since 2.13 eager models beside a compilation read a wrong `is_compiling()`; compiled calls do not care."""
        compiling = self._compiling
        if compiling is not None and private.is_compiling_is_process_wide():
            began = time.perf_counter()
            self._note(self._met(compiling, compiled=False))
            with self._lock:
                self.cost_s += time.perf_counter() - began

    def _told_yes(self) -> None:
        """In the thread that called compiled code: the flag is on."""
        me, began = threading.get_ident(), time.perf_counter()
        name = threading.current_thread().name
        frame = sys._getframe(1)
        while frame.f_back and not private.is_compile_wrapper(frame.f_code):
            frame = frame.f_back
        own = self._live.get(me)
        what = "compiled call, told that FX traces" + (", inside its own trace" if own else "")
        mine = _stack(name, what, frame.f_back or frame)
        live = own[-1:] if own else [stacks[-1] for stacks in list(self._live.values())]
        self._note([Meeting(tracer, mine) for tracer in live] or [Meeting(None, mine)])
        with self._lock:
            self.cost_s += time.perf_counter() - began

    def _met(self, tracer: Stack, *, compiled: bool) -> Iterator[Meeting]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        me = threading.get_ident()
        for ident, frame in sys._current_frames().items():
            if ident != me and ident not in self._live:
                found = _inside_call(names.get(ident, f"thread {ident}"), frame, compiled)
                if found is not None:
                    yield Meeting(tracer, found)

    def _note(self, meetings: Any) -> None:
        with self._lock:
            for meeting in meetings:
                if meeting in self._meetings or len(self._meetings) < KEPT:
                    self._meetings[meeting] += 1
                else:
                    self.dropped += 1


class _Inside:
    """Around one trace. A class, so that its frames do not lie between the tracer and its caller."""

    __slots__ = ("mine", "recorder")

    def __init__(self, recorder: Recorder, mine: Stack) -> None:
        self.recorder, self.mine = recorder, mine

    def __enter__(self) -> None:
        self.recorder._enter(self.mine)

    def __exit__(self, *error: object) -> None:
        self.recorder._leave(self.mine)


_installed: Recorder | None = None


def install() -> Recorder:
    """Starts to record, for the whole process. If it records already, the same recorder.

    Raises:
        UnsupportedTorch: this version is not known.
    """
    global _installed
    if _installed is None:
        recorder = Recorder()
        try:
            recorder._install()
        except BaseException:
            recorder.uninstall()
            raise
        _installed = recorder
    return _installed


def stuck() -> list[str]:
    """Tracing state that is on although no thread traces or compiles, in words; [] in a healthy process.

    Interleaved traces save and restore a flag of the process in the wrong order and can leave it on for good. Needs no
    recorder: the stacks of all threads show who traces.
    """
    found: list[str] = []
    for _ in range(3):  # a trace may end between the look at the state and the look at the stacks
        found = _left_on()
        if not found:
            return []
        time.sleep(0.002)
    return found


def _left_on() -> list[str]:
    state, healthy = private.tracing_state(), private.healthy_state()
    frames = sys._current_frames()
    mine = {threading.get_ident(): frames[threading.get_ident()]}
    tracers = any(_any_frame(frame, lambda code: code is _trace.__code__) for frame in frames.values())
    tracing_here = any(_any_frame(frame, lambda code: code is _trace.__code__) for frame in mine.values())
    compiling = any(_any_frame(frame, private.is_compiling_code) for frame in frames.values())
    found = []
    if state.fx_flag and not (tracing_here if private.flag_is_thread_local() else tracers):
        found.append("the FX tracing flag is on")
    if state.compiling_flag and not compiling and not tracers:
        found.append("torch.compiler.is_compiling() says yes")
    if not tracers:
        found += [
            f"nn.Module.{name} is FX's patch"
            for name, now in (("__call__", state.module_call), ("__getattr__", state.module_getattr))
            if private.is_fx_patch(now)
        ]
        if state.patcher is not healthy.patcher:
            found.append("an FX patcher is installed")
    return found


def _any_frame(frame: FrameType | None, wanted: Callable[[Any], bool]) -> bool:
    while frame is not None:
        if wanted(frame.f_code):
            return True
        frame = frame.f_back
    return False


def _inside_call(name: str, frame: FrameType | None, compiled: bool) -> Stack | None:
    """The stack of a thread that is inside a model or, if asked for, compiled code; from the call outwards."""
    call: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if code in _WAITS:
            return None
        if call is None and (code in _MODULE_CALL or private.is_compile_wrapper(code)):
            call = frame
        frame = frame.f_back
    if call is None or (private.is_compile_wrapper(call.f_code) and not compiled):
        return None
    what = "compiled call" if private.is_compile_wrapper(call.f_code) else "call of an eager model"
    return _stack(name, what, call.f_back or call)


def _outside_compiler(frame: FrameType) -> FrameType:
    """The frame that called compiled code, seen from inside the compilation."""
    at: FrameType | None = frame
    while at is not None:
        if private.is_compile_wrapper(at.f_code) and at.f_back:
            return at.f_back
        at = at.f_back
    return frame


def _stack(thread: str, what: str, frame: FrameType | None) -> Stack:
    lines: list[str] = []
    depth = hidden = 0
    while frame is not None and len(lines) < STACK_LINES:
        code = frame.f_code
        name = code.co_filename.rpartition("site-packages/")[2]
        if code not in _MODULE_CALL:
            if depth >= 2 and (name.startswith(PLUMBING[0]) or name.endswith(PLUMBING[1])):
                hidden += 1
            else:
                lines += [f"({hidden} frames of PyTorch)"] if hidden else []
                lines.append(f"{name}:{frame.f_lineno} {code.co_name}")
                hidden = 0
            depth += 1
        frame = frame.f_back
    return Stack(thread, what, tuple(lines))


def _side_by_side(meeting: Meeting, times: int) -> str:
    left = meeting.tracer or Stack("nobody", "the flag was left on: no thread traces", ())
    heads = [f"thread {side.thread!r}: {side.what}" for side in (left, meeting.met)]
    width = max(map(len, [heads[0], *left.lines]))
    rows = zip_longest([heads[0], *left.lines], [heads[1], *meeting.met.lines], fillvalue="")
    return "\n".join([f"{times} times", *(f"  {a:<{width}}  |  {b}".rstrip() for a, b in rows)])
