"""The gate: alone means alone, shared means together, whoever waits gets in, and nobody waits for ever."""

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from draftsmith.compile.gate import Gate, GateTimeout


def start(*bodies: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=body, daemon=True, name=f"worker-{i}") for i, body in enumerate(bodies)]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread], seconds: float = 20) -> None:
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), f"{thread.name} hangs"


def wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_many_share() -> None:
    gate, together = Gate(5), threading.Barrier(4)

    def body() -> None:
        with gate.mine():
            together.wait(5)

    threads = start(*[body] * 4)
    join(threads)
    assert not together.broken


def test_exclusive_overlaps_nothing() -> None:
    """Eight threads mix everything, nested in every way, for a while."""
    gate, shared, alone, faults = Gate(20), set[int](), set[int](), list[str]()
    end = time.monotonic() + 1.5

    def look(me: int) -> None:
        others = (shared | alone) - {me}
        if me in alone and others:
            faults.append(f"{me} alone beside {others}")
        if me in shared and alone - {me}:
            faults.append(f"{me} shares beside {alone}")

    def enter(chance: random.Random, me: int, depth: int) -> None:
        exclusive = chance.random() < 0.3
        with gate.exclusive("a test") if exclusive else gate.mine():
            was_shared, was_alone = me in shared, me in alone
            (alone if exclusive else shared).add(me)
            look(me)
            if depth and chance.random() < 0.5:
                if not was_alone and not exclusive:
                    shared.discard(me)  # a nested exclusive gives the shared place up while it waits
                enter(chance, me, depth - 1)
                shared.add(me) if not exclusive else None
            look(me)
            alone.discard(me) if exclusive and not was_alone else None
            shared.discard(me) if not was_shared else None

    def body(me: int) -> Callable[[], None]:
        def run() -> None:
            chance = random.Random(me)
            while time.monotonic() < end:
                enter(chance, me, 2)

        return run

    join(start(*(body(me) for me in range(8))))
    assert not faults
    assert gate.writer is None
    assert gate.inside() == []


def test_two_upgraders_do_not_deadlock() -> None:
    gate, both, order = Gate(5), threading.Barrier(2), list[int]()

    def body(me: int) -> Callable[[], None]:
        def run() -> None:
            with gate.mine():
                both.wait(5)
                with gate.exclusive("an upgrade"):
                    order.append(me)
                    assert gate.inside() == [threading.current_thread().name]
                assert threading.current_thread().name in gate.inside()  # its shared place is back

        return run

    join(start(body(0), body(1)))
    assert sorted(order) == [0, 1]
    assert gate.inside() == []


def test_who_waits_to_share_gets_in_between_two_exclusive_holds() -> None:
    """Three threads that are exclusive without a pause, so one of them always waits: a fourth still gets in often."""
    gate, holds, done = Gate(20), list[str](), threading.Event()

    def compile_all_the_time() -> None:
        for _ in range(40):
            with gate.exclusive("a test"):
                holds.append("exclusive")
                time.sleep(0.002)

    def share() -> None:
        while not done.is_set():
            with gate.mine():
                holds.append("shared")

    compilers, reader = start(*[compile_all_the_time] * 3), start(share)
    join(compilers)
    done.set()
    join(reader)
    between = sum(1 for a, b in itertools.pairwise(holds) if a == "exclusive" and b == "shared")
    assert holds.count("exclusive") == 120
    assert between > 60  # phase-fair: about one for each hold; an unfair gate gives a handful


def test_exclusive_holds_come_in_the_order_asked() -> None:
    gate, order, first = Gate(10), list[int](), threading.Event()

    def holder() -> None:
        with gate.exclusive("the first"):
            first.wait(10)

    def asks(me: int) -> Callable[[], None]:
        def run() -> None:
            with gate.exclusive("a later one"):
                order.append(me)

        return run

    threads = start(holder)
    wait_until(lambda: gate.writer is not None)
    for me in range(6):
        threads += start(asks(me))
        wait_until(lambda me=me: len(gate._exclusive_queue) == me + 1)  # type: ignore[misc]
    first.set()
    join(threads)
    assert order == list(range(6))


@pytest.mark.parametrize("holder_shares", [True, False])
@pytest.mark.parametrize("waiter_shares", [True, False])
def test_the_time_limit_names_the_holder(holder_shares: bool, waiter_shares: bool) -> None:
    if holder_shares and waiter_shares:
        return
    gate, leave = Gate(0.2), threading.Event()

    def stuck_in_here() -> None:
        with gate.mine() if holder_shares else gate.exclusive("compiling something"):
            leave.wait(10)

    threads = start(stuck_in_here)
    wait_until(lambda: gate.inside() == ["worker-0"])
    named = pytest.raises(GateTimeout, match=r"waited 0.2 s.*worker-0.*stuck_in_here")
    with named as caught, gate.mine() if waiter_shares else gate.exclusive("mine"):
        pytest.fail("got in beside an exclusive holder")
    if not holder_shares:
        assert "compiling something" in str(caught.value)
    leave.set()
    join(threads)
    with gate.exclusive("afterwards"), gate.mine():
        pass
    assert gate.inside() == []


def test_a_thread_that_dies_inside_leaves() -> None:
    """As after an asynchronous exception between two bytecodes: entered, never left."""
    gate = Gate(5)
    join(start(lambda: gate.mine().__enter__()))
    with gate.exclusive("after a dead reader"):
        pass
    join(start(lambda: gate.exclusive("dies").__enter__()))
    with gate.mine():
        pass
    kept = gate.exclusive("dies")  # as a frame that somebody keeps: nothing is collected, so nothing leaves by itself
    join(start(lambda: kept.__enter__()))
    with gate.exclusive("after a dead writer"):
        pass


def test_asynchronous_exceptions_while_waiting_leave_nothing_behind() -> None:
    gate = Gate(10)

    class Stop(Exception):
        pass

    for exclusive in (True, False):
        ended = threading.Event()

        def waits(exclusive: bool = exclusive, ended: threading.Event = ended) -> None:
            try:
                with gate.exclusive("never") if exclusive else gate.mine():
                    pytest.fail("got in")
            except Stop:
                ended.set()

        with gate.exclusive("the one inside"):
            (thread,) = start(waits)
            wait_until(lambda: bool(gate._exclusive_queue or gate._shared_queue))
            assert thread.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stop))
            assert ended.wait(10)
        join([thread])
        assert not gate._exclusive_queue
        assert not gate._shared_queue
        with gate.exclusive("afterwards"):
            pass


def test_a_dead_thread_whose_generator_stands_still_inside_has_left() -> None:
    gate, kept = Gate(3), []

    def inside() -> Iterator[None]:
        with gate.mine():
            yield

    def body() -> None:
        kept.append(inside())
        next(kept[0])

    join(start(body))
    assert gate.inside() == []
    with gate.exclusive("after it"):
        pass


def test_a_place_is_refused_to_other_threads() -> None:
    gate, errors = Gate(3), []
    mine = gate.mine()

    def body() -> None:
        try:
            mine.__enter__()
        except RuntimeError as error:
            errors.append(str(error))

    with gate.exclusive("tracing"):
        join(start(body))
    assert errors == ["this place is thread 'MainThread''s own; ask for one in each thread"]


@pytest.mark.parametrize("alone", [False, True])
def test_other_threads_are_forgotten(alone: bool) -> None:
    """As in a forked child: also who had the gate's own lock, which no thread of the child gives back."""
    gate, inside, done = Gate(3), threading.Event(), threading.Event()

    def body() -> None:
        with gate.exclusive("tracing") if alone else gate.mine(), gate._changed:
            inside.set()
            done.wait(20)

    threads = start(body)
    assert inside.wait(10)
    changed = gate._changed
    assert gate.forget_other_threads() == alone
    with gate.exclusive("the child's"), gate.mine():
        assert gate.inside() == ["MainThread"]
    gate._changed = changed
    done.set()
    join(threads)
