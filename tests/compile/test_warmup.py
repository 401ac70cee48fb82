"""Warm-up compiles in order, says what it did, and leaves nothing to compile."""

import pytest
import torch

from draftsmith.compile import guard
from draftsmith.compile.warmup import Signature, Warmed, warm_up


def test_signatures_are_compiled_in_order_and_once() -> None:
    double = guard.compile(lambda x: x * 2, backend="aot_eager")
    order: list[str] = []

    def signature(length: int) -> Signature:
        def run() -> None:
            order.append(f"run {length}")
            double(torch.ones(length, requires_grad=True)).sum().backward()

        return Signature(f"length {length}", run)

    results = warm_up([signature(n) for n in (3, 4, 3)], lambda done: order.append(f"done {done.name}"))
    assert order == ["run 3", "done length 3", "run 4", "done length 4", "run 3", "done length 3"]
    assert [len(result.compilations) for result in results] == [1, 1, 0]
    assert results[2].cache == "warm"
    assert results[0].cache in ("hit", "miss", "off")
    assert "float32[4]@cpu grad" in results[1].compilations[0].signature
    before = guard.count_compilations()
    double(torch.ones(4, requires_grad=True)).sum().backward()
    assert guard.count_compilations() == before


def test_one_miss_makes_a_miss() -> None:
    def compiled(cache: str) -> guard.Compilation:
        return guard.Compilation("f", "float32[2]", "MainThread", 1.0, cache)

    assert Warmed("a", 1.0, (compiled("hit"), compiled("miss"))).cache == "miss"
    assert Warmed("a", 1.0, (compiled("hit"), compiled("hit"))).cache == "hit"


def test_what_cannot_be_compiled_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("no kernel for this shape")

    with pytest.raises(RuntimeError, match="no kernel"):
        warm_up([Signature("broken", fail)])
