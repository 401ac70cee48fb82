"""Greedy speculative decoding is plain greedy decoding, whatever the drafter guesses; and rounds are counted right."""

import pytest
import torch

from conftest import tiny_drafter, tiny_target
from draftsmith.decode import cache, states
from draftsmith.decode import evaluate as evaluate_room
from draftsmith.decode.evaluate import evaluate, library_generate
from draftsmith.decode.figures import acceptance_per_position, tau
from draftsmith.decode.speculate import Generation, plain_generate, speculative_generate
from draftsmith.decode.states import TargetState
from draftsmith.drafter.config import FULL, SLIDING
from draftsmith.drafter.model import Drafter
from draftsmith.errors import InputError
from draftsmith.target.capture import decoder_layers
from draftsmith.target.load import Target

PROMPTS = [[1, 2, 3], [7], list(range(20)), [5, 5, 5, 5], [9, 30, 12, 44, 2]]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def oracle(monkeypatch: pytest.MonkeyPatch, target: Target, prompt: list[int], wrong_at: dict[int, int]) -> None:
    """Makes every draft the target's own continuation, except at chosen slots of chosen rounds."""
    truth = plain_generate(target, prompt, 64).tokens
    rounds = iter(range(1000))

    def logits(self: states.DraftState, anchor_token: int, size: int) -> torch.Tensor:
        done = self.cache.length - len(prompt)
        out = torch.nn.functional.one_hot(torch.tensor(truth[done + 1 : done + size]), 64).float()
        slot = wrong_at.get(next(rounds))
        return out if slot is None or slot >= size else out.index_fill(0, torch.tensor([slot - 1]), 0.0)

    monkeypatch.setattr(states.DraftState, "logits", logits)


@pytest.mark.parametrize("kind", [(FULL, FULL), (FULL, SLIDING), (SLIDING, SLIDING)], ids=str)
def test_any_drafter_leaves_the_output_alone(target: Target, kind: tuple[str, ...]) -> None:
    drafters = [tiny_drafter(seed, layer_types=kind, sliding_window=5) for seed in range(2)]
    for prompt in PROMPTS:
        expected = plain_generate(target, prompt, 30).tokens
        for drafter in drafters:
            assert speculative_generate(target, drafter, prompt, 30).tokens == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 30])
def test_partly_right_drafts_keep_the_output_and_the_limit(
    target: Target, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are right for a while exercise every rollback length."""
    for prompt in PROMPTS:
        expected = plain_generate(target, prompt, limit).tokens
        with monkeypatch.context() as patch:
            oracle(patch, target, prompt, {0: 2, 1: 1, 3: 3, 4: 1})
            got = speculative_generate(target, tiny_drafter(), prompt, limit)
        assert got.tokens == expected
        assert len(got.tokens) == limit
        assert 1 + sum(got.rounds) == limit


def test_rounds_are_counted_as_the_contract_says(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """B = 4, 12 tokens: the prefill's, rounds of 4 (all right), 2 (second slot wrong), 4, and a short one."""
    oracle(monkeypatch, target, [1, 2, 3], {1: 2})
    got = speculative_generate(target, tiny_drafter(), [1, 2, 3], 12)
    assert got.rounds == (4, 2, 4, 1)
    assert got.accepted == (3, 1, 3, 1)  # one token was left: a block of two slots, cut after the first
    assert tau([got]) == pytest.approx(11 / 4)
    assert acceptance_per_position([got], 4) == (1.0, 0.5, 0.5)


def test_a_round_is_cut_after_the_stop_token(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [1, 2, 3]
    truth = plain_generate(target, prompt, 12).tokens
    place = next(i for i in range(2, 8) if truth[i] not in truth[:i])
    stopping = tiny_target(stop_ids=(truth[place],))
    oracle(monkeypatch, target, prompt, {})
    got = speculative_generate(stopping, tiny_drafter(), prompt, 12)
    assert got.tokens == truth[: place + 1] == plain_generate(stopping, prompt, 12).tokens
    assert sum(got.rounds) == place
    assert got.accepted[-1] <= got.rounds[-1]


def test_a_first_token_that_stops_makes_no_round(target: Target) -> None:
    first = plain_generate(target, [1, 2, 3], 1).tokens[0]
    got = speculative_generate(tiny_target(stop_ids=(first,)), tiny_drafter(), [1, 2, 3], 12)
    assert (got.tokens, got.rounds, tau([got])) == ((first,), (), 1.0)


def test_tau_is_micro_averaged() -> None:
    a = Generation((0,) * 9, 1.0, (4, 4), (3, 3))
    b = Generation((0,) * 3, 1.0, (1, 1), (0, 0))
    assert tau([a, b]) == 10 / 4


def test_the_library_baseline_decodes_the_same(target: Target) -> None:
    for prompt in PROMPTS:
        assert library_generate(target, prompt, 20).tokens == plain_generate(target, prompt, 20).tokens


def test_a_wrong_rollback_is_noticed(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the probe, and by the comparison should it ever get so far: forgetting one token too few."""
    forget = cache.TargetCache.forget
    monkeypatch.setattr(cache.TargetCache, "forget", lambda self, tokens: forget(self, max(0, tokens - 1)))
    start = cache.ContextLayer.__init__
    monkeypatch.setattr(cache.ContextLayer, "__init__", lambda self, capacity: start(self, capacity + 99))
    with pytest.raises(InputError, match="does not forget what it is told"):
        evaluate(target, tiny_drafter(), PROMPTS, 30)
    monkeypatch.setattr(evaluate_room, "probe_target", lambda target, trees: None)
    assert not evaluate(target, tiny_drafter(), PROMPTS, 30).main.lossless


def test_prompts_that_stop_at_once_are_no_speed_up(target: Target) -> None:
    first = plain_generate(target, [1, 2, 3], 1).tokens[0]
    report = evaluate(tiny_target(stop_ids=(first,)), tiny_drafter(), [[1, 2, 3]], 10)
    assert (report.main.tau, report.main.speedup, report.main.lossless) == (1.0, 1.0, True)


def test_evaluate_reports_what_it_decoded(target: Target) -> None:
    report = evaluate(target, tiny_drafter(), PROMPTS, 10)
    assert report.main.lossless
    assert report.main.ties == ()
    assert report.prompts == len(PROMPTS)
    assert report.main.new_tokens == 10 * len(PROMPTS)
    assert report.main.tau == pytest.approx(
        sum(map(sum, report.main.rounds_per_prompt)) / sum(len(r) for r in report.main.rounds_per_prompt)
    )
    assert len(report.main.accept_per_position) == 3
    assert report.main.speedup == pytest.approx(report.main.tokens_per_second / report.baseline_tokens_per_second)


@torch.inference_mode()
def test_served_features_are_the_trained_ones(target: Target) -> None:
    """End to end: features taken piece by piece with a cache equal those of the training path, to 1e-4."""
    ids = torch.randint(0, 60, (33,), generator=torch.Generator().manual_seed(1))
    trained = target.features([ids])[0]
    reader = TargetState(target, 33)
    parts = []
    for part in ids.split([10, 1, 4, 18]):
        _, hidden = reader.forward(part, features=True)
        assert hidden is not None
        parts.append(hidden)
    served = torch.cat(parts)
    assert (served - trained).abs().max() <= 1e-4 * trained.abs().max()


def test_the_embedded_target_decodes_losslessly(demo_target: Target) -> None:
    from draftsmith.data.conversations import read_prompts
    from draftsmith.data.template import Renderer
    from draftsmith.drafter.init import init_from_target

    renderer = Renderer(demo_target.tokenizer)
    prompts = [renderer.prompt_ids(prompt) for prompt in read_prompts(["demo"])[:3]]
    from conftest import demo_shape

    drafter = Drafter(demo_shape(demo_target))
    init_from_target(drafter, decoder_layers(demo_target.model, 10), demo_target.model.model.norm, 0)
    report = evaluate(demo_target, drafter, prompts, 24)
    assert report.main.lossless
