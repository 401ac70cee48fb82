"""A failing worker: its cause first and at once, the others released, the stuck ones named."""

import threading
import time

import pytest

from draftsmith.errors import StoppedError
from draftsmith.pipeline import threads
from draftsmith.pipeline.threads import Crew, Failure


def test_all_workers_end_without_failure() -> None:
    done = []
    Crew(lambda: None).run([(f"w{n}", lambda n=n: done.append(n)) for n in range(3)], lambda failure: None)
    assert sorted(done) == [0, 1, 2]


def test_the_cause_is_reported_within_a_second_and_raised() -> None:
    released = threading.Event()
    heard: list[tuple[float, Failure]] = []
    began = time.monotonic()

    def waits() -> None:
        released.wait(30)
        raise StoppedError("released")

    def fails() -> None:
        time.sleep(0.05)
        raise OSError("the cause")

    crew = Crew(released.set)
    with pytest.raises(OSError, match="the cause"):
        crew.run(
            [("a", waits), ("b", fails), ("c", waits)],
            lambda failure: heard.append((time.monotonic() - began, failure)),
        )
    seconds, failure = heard[0]
    assert seconds < 1
    assert failure.worker == "b"
    assert time.monotonic() - began < 2


def test_what_follows_from_a_failure_is_not_the_cause() -> None:
    released = threading.Event()

    def follows() -> None:
        released.wait(30)
        raise ValueError("a consequence")

    def fails() -> None:
        raise OSError("the cause")

    with pytest.raises(OSError, match="the cause"):
        Crew(released.set).run([("a", follows), ("b", fails)], lambda failure: None)


def test_a_stuck_worker_is_named_and_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "JOIN_S", 0.2)
    forever = threading.Event()

    def fails() -> None:
        raise OSError("the cause")

    began = time.monotonic()
    with pytest.raises(OSError, match="the cause") as caught:
        Crew(lambda: None).run([("stuck one", lambda: forever.wait(20) and None), ("b", fails)], lambda failure: None)
    forever.set()
    assert time.monotonic() - began < 2
    assert any("stuck one" in note for note in caught.value.__notes__)
