"""The bounded channel: byte limit, order of reservations, no deadlock behind a slow producer, waking on close."""

import threading
import time

import pytest

from draftsmith.errors import StoppedError
from draftsmith.pipeline.channel import Channel


def in_thread(body: object) -> threading.Thread:
    assert callable(body)
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def test_bytes_never_exceed_the_capacity() -> None:
    channel: Channel[int] = Channel(100)
    levels = []

    def produce() -> None:
        for number in range(50):
            channel.reserve(number, 30)
            levels.append(channel.statistics().used_bytes)
            channel.put(number, number)

    thread = in_thread(produce)
    assert [channel.take(number) for number in range(50)] == list(range(50))
    thread.join(5)
    assert max(levels) <= 100
    assert channel.statistics().peak_bytes == 90
    assert channel.statistics().used_bytes == 0


def test_a_producer_waits_for_room() -> None:
    channel: Channel[str] = Channel(100)
    channel.reserve(0, 80)
    channel.put(0, "a")
    reserved = threading.Event()

    def second() -> None:
        channel.reserve(1, 30)
        reserved.set()

    in_thread(second)
    assert not reserved.wait(0.1)
    assert channel.take(0) == "a"
    assert reserved.wait(2)


def test_reservations_are_granted_in_order() -> None:
    """Number 1 may not take the room that number 0 still needs: that would deadlock an in-order consumer."""
    channel: Channel[str] = Channel(100)
    granted = []

    def reserve(number: int) -> None:
        channel.reserve(number, 60)
        granted.append(number)

    in_thread(lambda: reserve(1))
    time.sleep(0.05)
    assert granted == []
    in_thread(lambda: reserve(0))
    time.sleep(0.05)
    assert granted == [0]
    channel.put(0, "x")
    channel.take(0)
    time.sleep(0.05)
    assert granted == [0, 1]


def test_a_slow_producer_does_not_lock_the_consumer_out() -> None:
    """Row 0 is made 100 times slower than the others, which fill the channel meanwhile."""
    channel: Channel[int] = Channel(3 * 10)
    numbers = iter(range(30))
    claim = threading.Lock()

    def produce() -> None:
        while True:
            with claim:
                number = next(numbers, None)
                if number is None:
                    return
                channel.reserve(number, 10)
            time.sleep(0.2 if number == 0 else 0.002)
            channel.put(number, number)

    for _ in range(3):
        in_thread(produce)
    got: list[int] = []
    consumer = in_thread(lambda: got.extend(channel.take(number) for number in range(30)))
    consumer.join(10)
    assert got == list(range(30))


def test_close_wakes_everybody() -> None:
    channel: Channel[str] = Channel(10)
    channel.reserve(0, 10)
    outcomes = []

    def expect_stop(call: object) -> None:
        assert callable(call)
        with pytest.raises(StoppedError):
            call()
        outcomes.append("stopped")

    threads = [
        in_thread(lambda: expect_stop(lambda: channel.take(0))),
        in_thread(lambda: expect_stop(lambda: channel.reserve(1, 5))),
    ]
    time.sleep(0.05)
    channel.close()
    for thread in threads:
        thread.join(2)
    assert outcomes == ["stopped", "stopped"]
    with pytest.raises(StoppedError):
        channel.put(0, "late")


def test_an_item_larger_than_the_channel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pipeline\.channel_mib"):
        Channel[int](10).reserve(0, 11)
