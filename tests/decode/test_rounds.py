"""The loop does no needless work: one wait for the device per round, memory allocated once, time accounted for."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from conftest import tiny_drafter, tiny_target
from draftsmith.decode import states
from draftsmith.decode.cache import ContextLayer
from draftsmith.decode.methods import Chain, LookUp, Method, Tree
from draftsmith.decode.sampling import GREEDY, Sampling
from draftsmith.decode.speculate import decode

METHODS: dict[str, tuple[Callable[[], Method], Sampling]] = {
    "chain": (lambda: Chain(tiny_drafter()), GREEDY),
    "drawn": (lambda: Chain(tiny_drafter()), Sampling(1.0, 0.9, 20)),
    "tree": (lambda: Tree(tiny_drafter(), 9), GREEDY),
    "sampled tree": (lambda: Tree(tiny_drafter(), 9), Sampling(1.0)),
    "look-up": (lambda: LookUp(4), GREEDY),
}


class Waits:
    """Counts everything that would wait for a device, outside the target's own forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.inside = 0, False
        for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero"):
            monkeypatch.setattr(Tensor, name, self.counted(getattr(Tensor, name)))
        forward = states.TargetState.forward

        def quiet(*args: Any, **kwargs: Any) -> Any:
            before = self.count
            out = forward(*args, **kwargs)
            self.count = before
            return out

        monkeypatch.setattr(states.TargetState, "forward", quiet)

    def counted(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += not self.inside
            outer, self.inside = self.inside, True
            try:
                return method(*args, **kwargs)
            finally:
                self.inside = outer

        return call


@pytest.mark.parametrize("name", METHODS)
def test_a_round_waits_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, sampling = METHODS[name]
    method, target, waits = make(), tiny_target(), Waits(monkeypatch)
    at: list[int] = []
    decode(target, method, [1, 2, 3], 40, sampling, on_round=lambda tokens, drafted: at.append(waits.count))
    assert len(at) > 8
    per_round = {after - before for before, after in pairwise(at)}
    assert per_round == {1}


def test_keys_and_values_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a round nor a rollback moves the memory of either cache."""
    places: set[tuple[int, int]] = set()
    update = ContextLayer.update

    def watched(self: ContextLayer, *args: Any, **kwargs: Any) -> Any:
        out = update(self, *args, **kwargs)
        places.add((out[0].data_ptr(), out[1].data_ptr()))
        return out

    monkeypatch.setattr(ContextLayer, "update", watched)
    decode(tiny_target(), Chain(tiny_drafter()), [1, 2, 3], 40)
    assert len(places) == 5  # one per layer


def test_time_is_accounted_for() -> None:
    got = decode(tiny_target(), Chain(tiny_drafter()), [1, 2, 3], 40)
    parts = (got.shares.draft_s, got.shares.verify_s, got.shares.bookkeeping_s)
    assert min(parts) > 0
    assert 0.8 * got.decode_s <= sum(parts) <= got.decode_s
    assert decode(tiny_target(), LookUp(4), [1, 2, 3], 40).shares.draft_s < got.shares.draft_s


def test_rounds_tell_what_was_drafted() -> None:
    told: list[tuple[list[int], int]] = []
    got = decode(tiny_target(), Tree(tiny_drafter(), 90), [1, 2, 3], 40, on_round=lambda *round: told.append(round))
    assert [token for tokens, _ in told for token in tokens] == list(got.tokens)
    assert told[0][1] == 0
    assert [drafted for _, drafted in told[1:]] == list(got.accepted)
    assert all(drafted in (len(tokens), len(tokens) - 1) for tokens, drafted in told[1:])
    assert sum(got.accepted) > 0
