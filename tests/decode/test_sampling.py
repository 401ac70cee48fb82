"""Sampled speculative decoding has exactly the target's distribution: chi-square at every position, Holm-corrected.

The truth is computed, not sampled: a target with few tokens left after filtering has a known distribution at each
position of an answer. A wrong verifier has to fail the same test. P-values are printed (`pytest -s`).
"""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from conftest import tiny_drafter, tiny_target
from draftsmith.decode.methods import Chain, LookUp, Method, Tree
from draftsmith.decode.sampling import Dice, Sampling
from draftsmith.decode.speculate import decode, plain_generate
from draftsmith.decode.tree import best_tree
from draftsmith.decode.verify import Proposal, Verdict, verify
from draftsmith.errors import ConfigError
from draftsmith.target.load import Target

V, SLOTS, DRAWS, SEEDS, ALPHA = 6, 3, 200, range(20), 0.01
SAMPLING = Sampling(temperature=0.8, top_p=0.95, top_k=5)


def chi_square_p(observed: Counter[int], expected: Tensor, draws: int) -> float:
    """P-value of the counts under the expected probabilities; 0 where an impossible token occurred.

    Tokens that are expected fewer than five times are counted together, or the approximation does not hold.
    """
    if any(expected[token] == 0 for token in observed):
        return 0.0
    cells = [(observed[token], draws * p) for token, p in enumerate(expected.tolist())]
    often = [cell for cell in cells if cell[1] >= 5]
    seldom = (draws - sum(seen for seen, _ in often), draws - sum(mean for _, mean in often))
    cells = [*often, seldom] if seldom[1] >= 1 else often
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def holm_rejects(p_values: Sequence[float], alpha: float) -> int:
    """How many hypotheses fall under Holm's correction, with the family's error at most alpha."""
    ranked = sorted(p_values)
    for place, p in enumerate(ranked):
        if p > alpha / (len(ranked) - place):
            return place
    return len(ranked)


class Tables:
    """A target and a drafter as tables: the target's next token depends on the last one, the drafter's on the slot."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target_VV = 1.5 * torch.randn(V, V, generator=generator)
        self.draft_SV = 1.5 * torch.randn(SLOTS, V, generator=generator)
        self.q_SV = SAMPLING.probabilities(self.draft_SV)
        self.tree = best_tree(self.draft_SV.log_softmax(-1), 7)

    def truth(self) -> list[Tensor]:
        """The exact distribution of the token at each of SLOTS + 1 positions after token 0."""
        step_VV = SAMPLING.probabilities(self.target_VV).double()
        return [torch.linalg.matrix_power(step_VV, place + 1)[0] for place in range(SLOTS + 1)]

    def p_values(self, seed: int, propose: "Propose", judge: "Judge" = verify) -> list[float]:
        """One per position, of `DRAWS` answers decoded in rounds."""
        dice = Dice(SAMPLING, seed, torch.device("cpu"))
        counts: list[Counter[int]] = [Counter() for _ in range(SLOTS + 1)]
        for _ in range(DRAWS):
            answer = [0]
            while len(answer) < SLOTS + 2:
                proposal = propose(self, dice)
                proposal.ids_R[0] = answer[-1]
                answer += judge(proposal, self.target_VV[proposal.ids_R], dice).tokens
            for place, token in enumerate(answer[1 : SLOTS + 2]):
                counts[place][token] += 1
        return [chi_square_p(seen, truth, DRAWS) for seen, truth in zip(counts, self.truth(), strict=True)]


Propose = Callable[[Tables, Dice], Proposal]
Judge = Callable[[Proposal, Tensor, Dice], Verdict]
ANCHOR = torch.zeros(1, dtype=torch.long)


def drawn(tables: Tables, dice: Dice) -> Proposal:
    """Drafts drawn from the drafter's own filtered distribution."""
    return Proposal(torch.cat((ANCHOR, dice.draw(tables.q_SV))), drawn_from_NV=tables.q_SV)


def chosen(tables: Tables, dice: Dice) -> Proposal:
    """The drafter's most likely tokens."""
    return Proposal(torch.cat((ANCHOR, tables.draft_SV.argmax(-1))))


def branching(tables: Tables, dice: Dice) -> Proposal:
    """A tree of seven nodes."""
    return Proposal(torch.cat((ANCHOR, tables.tree.tokens_N)), tree=tables.tree)


def family(propose: Propose, judge: Judge = verify) -> list[float]:
    """P-values of all seeds and positions."""
    values = [p for seed in SEEDS for p in Tables(seed).p_values(seed, propose, judge)]
    print(propose.__name__, "p-values:", " ".join(f"{p:.3g}" for p in sorted(values)))
    return values


@pytest.mark.parametrize("propose", [drawn, chosen, branching])
def test_samples_have_the_targets_distribution(propose: Propose) -> None:
    assert holm_rejects(family(propose), ALPHA) == 0


def chosen_as_if_drawn(tables: Tables, dice: Dice) -> Proposal:
    """Wrong: the most likely tokens, verified as if the drafter had drawn them."""
    return Proposal(chosen(tables, dice).ids_R, drawn_from_NV=tables.q_SV)


def replacing_from_the_whole(proposal: Proposal, logits_RV: Tensor, dice: Dice) -> Verdict:
    """Wrong: after a rejection it draws from p instead of max(0, p - q)."""
    assert proposal.drawn_from_NV is not None
    p_RV, q_NV, drafts = SAMPLING.probabilities(logits_RV), proposal.drawn_from_NV, proposal.ids_R[1:].tolist()
    kept = 0
    while (
        kept < len(drafts)
        and torch.rand((), generator=dice._generator) * q_NV[kept, drafts[kept]] < p_RV[kept, drafts[kept]]
    ):
        kept += 1
    return Verdict(list(range(kept + 1)), [*drafts[:kept], int(dice.draw(p_RV[kept : kept + 1]))])


def filtering_otherwise(proposal: Proposal, logits_RV: Tensor, dice: Dice) -> Verdict:
    """Wrong: verifies against a distribution with more tokens in it than the one asked for."""
    wider = Dice(Sampling(SAMPLING.temperature, top_p=0.99), 0, torch.device("cpu"))
    wider._generator = dice._generator
    return verify(proposal, logits_RV, wider)


@pytest.mark.parametrize(
    ("propose", "judge"),
    [(chosen_as_if_drawn, verify), (drawn, replacing_from_the_whole), (chosen, filtering_otherwise)],
    ids=["greedy drafts as if drawn", "replaces from p", "another filter"],
)
def test_a_wrong_verifier_is_rejected(propose: Propose, judge: Judge) -> None:
    assert holm_rejects(family(propose, judge), ALPHA) > 0


# The same through the whole loop: models, caches, several rounds, the short last block.

FEW = Sampling(temperature=0.7, top_k=3)
PROMPT, LENGTH = [3, 1, 4], 6
MIXED = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 4}
METHODS: dict[str, Callable[[], Method]] = {
    "drawn": lambda: Chain(tiny_drafter(**MIXED)),
    "chosen": lambda: Chain(tiny_drafter(), greedy=True),
    "tree": lambda: Tree(tiny_drafter(), 9),
    "look-up": lambda: LookUp(4),
}


def true_marginals(target: Target) -> list[Tensor]:
    """Exact distribution of the token at each of LENGTH positions, by walking through all answers."""
    prefixes, weights = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    marginals = []
    for _ in range(LENGTH):
        with torch.no_grad():
            p_TV = FEW.probabilities(target.model(prefixes).logits[:, -1]).double() * weights[:, None]
        marginals.append(p_TV.sum(0) / p_TV.sum())
        rows, tokens = p_TV.nonzero(as_tuple=True)
        prefixes, weights = torch.cat((prefixes[rows], tokens[:, None]), 1), p_TV[rows, tokens]
    return marginals


def loop_p_values(name: str, seed: int, draws: int, target: Target, truth: list[Tensor]) -> list[float]:
    counts: list[Counter[int]] = [Counter() for _ in range(LENGTH)]
    method = METHODS[name]() if name in METHODS else None
    for draw in range(draws):
        seeds = 1000 * seed + draw
        if method is None:
            tokens = plain_generate(target, PROMPT, LENGTH, FEW, seeds).tokens
        else:
            tokens = decode(target, method, PROMPT, LENGTH, FEW, seeds).tokens
        for place, token in enumerate(tokens):
            counts[place][token] += 1
    return [chi_square_p(seen, expected, draws) for seen, expected in zip(counts, truth, strict=True)]


@pytest.mark.parametrize("name", [*METHODS, "plain"])
def test_the_loop_samples_the_targets_distribution(name: str) -> None:
    target = tiny_target()
    values = loop_p_values(name, 0, 150, target, true_marginals(target))
    print(name, "p-values:", " ".join(f"{p:.3g}" for p in values))
    assert holm_rejects(values, ALPHA) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_loop_samples_the_targets_distribution_for_every_seed(name: str) -> None:
    target = tiny_target()
    truth = true_marginals(target)
    values = [p for seed in SEEDS for p in loop_p_values(name, seed, 300, target, truth)]
    print(name, "p-values:", " ".join(f"{p:.3g}" for p in sorted(values)))
    assert holm_rejects(values, ALPHA) == 0


def test_filters_leave_what_they_say() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def kept(**how: float) -> list[float]:
        return [round(p, 4) for p in Sampling(1.0, **how).probabilities(logits)[0].tolist()]  # type: ignore[arg-type]

    assert kept() == [0.5, 0.3, 0.15, 0.05]
    assert kept(top_k=2) == [0.625, 0.375, 0, 0]
    assert kept(top_p=0.8) == [0.625, 0.375, 0, 0]
    assert kept(top_p=0.81) == [round(x / 0.95, 4) for x in (0.5, 0.3, 0.15)] + [0]
    assert kept(top_p=0.01) == [1, 0, 0, 0]
    assert kept(top_k=3, top_p=0.6) == [0.625, 0.375, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_filters_agree_with_transformers(seed: int) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
    theirs = logits
    for warper in (TemperatureLogitsWarper(0.6), TopKLogitsWarper(20), TopPLogitsWarper(0.9)):
        theirs = warper(None, theirs)
    assert torch.allclose(Sampling(0.6, 0.9, 20).probabilities(logits), theirs.softmax(-1), atol=1e-6)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "--temperature is -1.0"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p is 0.0"),
        ({"temperature": 1.0, "top_k": -2}, "--top-k is -2"),
        ({"top_k": 4}, "have no effect without --temperature"),
    ],
)
def test_impossible_sampling_is_refused(how: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**how)  # type: ignore[arg-type]
