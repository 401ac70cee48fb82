"""What is said about a set of generations."""

import pytest

from draftsmith.decode.clock import Shares
from draftsmith.decode.figures import figures, repetition_share, speed, tau, tau_interval
from draftsmith.decode.speculate import Generation


def generation(rounds: tuple[int, ...], tokens: tuple[int, ...] = (), decode_s: float = 1.0) -> Generation:
    return Generation(
        tokens or (0,) * (1 + sum(rounds)), decode_s, rounds, tuple(r - 1 for r in rounds), (4,) * len(rounds)
    )


def test_micro_and_macro_tau_differ_where_prompts_do() -> None:
    got = figures([generation((4, 4, 4)), generation((1,)), generation(())], 4, 2.0, True, [])
    assert got.tau == 13 / 4
    assert got.tau_per_prompt == (4.0, 1.0, 1.0)
    assert got.tau_macro == 2.0
    assert got.accept_per_position == (0.75, 0.75, 0.75)
    assert got.new_tokens == 13 + 3
    assert got.tokens_per_second == pytest.approx(13 / 3)
    assert got.speedup == pytest.approx(13 / 3 / 2)


def test_the_interval_is_as_wide_as_the_prompts_differ() -> None:
    same = [generation((3, 3))] * 40
    assert tau_interval(same) == (3.0, 3.0)
    mixed = [generation((2, 2)), generation((4, 4))] * 40
    low, high = tau_interval(mixed)
    assert low < tau(mixed) == 3.0 < high
    assert 2.75 < low < 2.85  # 80 prompts of standard deviation 1: 3 - 1.96 / sqrt(80) = 2.78
    assert 3.15 < high < 3.25
    assert tau_interval(mixed) == (low, high)
    few = tau_interval(mixed[:8])
    assert few[1] - few[0] > 2 * (high - low)


def test_repetition_counts_what_stood_there_before() -> None:
    assert repetition_share([generation((), tuple(range(10)))]) == 0.0
    assert repetition_share([generation((), (1, 2, 3, 4) * 4)]) == pytest.approx(9 / 13)
    assert repetition_share([generation((), (1, 2))]) == 0.0
    loop, text = generation((), (7,) * 23), generation((), tuple(range(23)))
    assert repetition_share([loop, text]) == pytest.approx(19 / 40)


def test_shares_of_time_add_up() -> None:
    g = Generation((1, 2), 1.0, (1,), (0,), (4,), Shares(1.0, 2.0, 1.0))
    got = figures([g], 4, 1.0, None, [])
    assert (got.draft_share, got.verify_share, got.bookkeeping_share) == (0.25, 0.5, 0.25)
    assert speed([g]) == 1.0
