"""What a set of generations amounts to: τ, acceptance, repetition, and how sure τ is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.decode.speculate import Generation

RESAMPLES, CONFIDENCE = 2000, 0.95
GRAM = 4  # tokens


def tau(generations: Sequence[Generation]) -> float:
    """Tokens produced in rounds / rounds, over all prompts; 1.0 if there was no round."""
    rounds = sum(len(g.rounds) for g in generations)
    return sum(sum(g.rounds) for g in generations) / rounds if rounds else 1.0


def tau_interval(generations: Sequence[Generation]) -> tuple[float, float]:
    """95 % confidence interval of τ, by drawing as many prompts with replacement, 2,000 times (fixed seed).

    It says how much τ would move with other prompts of the same kind.
    """
    counts_P = np.array([len(g.rounds) for g in generations])
    tokens_P = np.array([sum(g.rounds) for g in generations])
    drawn_RP = np.random.default_rng(0).integers(0, len(counts_P), (RESAMPLES, len(counts_P)))
    rounds_R = counts_P[drawn_RP].sum(1)
    taus_R = np.where(rounds_R > 0, tokens_P[drawn_RP].sum(1) / np.maximum(rounds_R, 1), 1.0)
    low, high = np.quantile(taus_R, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


def acceptance_per_position(generations: Sequence[Generation], block_size: int) -> tuple[float, ...]:
    """Share of all rounds in which slot k's draft (k = 1..B-1) was kept."""
    accepted = [kept for g in generations for kept in g.accepted]
    return tuple(sum(kept >= k for kept in accepted) / max(1, len(accepted)) for k in range(1, block_size))


def repetition_share(generations: Sequence[Generation]) -> float:
    """Share of the answers' 4-grams that stood in the same answer before.

    Text that runs in circles is easy to draft: a high share means a τ that real text would not give.
    """
    repeated = total = 0
    for g in generations:
        grams = list(zip(*(g.tokens[start:] for start in range(GRAM)), strict=False))
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def speed(generations: Sequence[Generation]) -> float:
    """Tokens per second of decoding time; the first token of each prompt and the time to it do not count."""
    return sum(len(g.tokens) - 1 for g in generations) / max(1e-9, sum(g.decode_s for g in generations))


@dataclass(frozen=True, slots=True)
class Tie:
    """A place in lower precision where both tokens are right: the target's own gap is below its own noise."""

    prompt: int
    position: int
    gap: float
    noise: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One way of drafting over all prompts. `tau` is over all rounds, `tau_macro` the mean of the prompts' own.

    `lossless` is None when sampling; `*_share` are shares of the rounds' time.
    """

    tau: float
    tau_macro: float
    tau_interval: tuple[float, float]
    tau_per_prompt: tuple[float, ...]
    rounds_per_prompt: tuple[tuple[int, ...], ...]
    accept_per_position: tuple[float, ...]
    repetition_share: float
    tokens_per_second: float
    speedup: float
    lossless: bool | None
    ties: tuple[Tie, ...]
    draft_share: float
    verify_share: float
    bookkeeping_share: float
    new_tokens: int


def figures(
    generations: Sequence[Generation],
    block_size: int,
    baseline_tokens_per_second: float,
    lossless: bool | None,
    ties: Sequence[Tie],
) -> Figures:
    """Everything that can be said about one way of drafting."""
    parts_s = [sum(getattr(g.shares, name) for g in generations) for name in ("draft_s", "verify_s", "bookkeeping_s")]
    draft_share, verify_share, bookkeeping_share = (part_s / max(1e-9, sum(parts_s)) for part_s in parts_s)
    per_prompt = tuple(tau([g]) for g in generations)
    tokens_per_second = speed(generations)
    return Figures(
        tau=tau(generations),
        tau_macro=sum(per_prompt) / len(per_prompt),
        tau_interval=tau_interval(generations),
        tau_per_prompt=per_prompt,
        rounds_per_prompt=tuple(g.rounds for g in generations),
        accept_per_position=acceptance_per_position(generations, block_size),
        repetition_share=repetition_share(generations),
        tokens_per_second=tokens_per_second,
        speedup=tokens_per_second / baseline_tokens_per_second if baseline_tokens_per_second else 1.0,
        lossless=lossless,
        ties=tuple(ties),
        draft_share=draft_share,
        verify_share=verify_share,
        bookkeeping_share=bookkeeping_share,
        new_tokens=sum(len(g.tokens) for g in generations),
    )
