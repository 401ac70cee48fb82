"""Draft, verify all drafts in one target forward, keep what the target would have written itself.

Round: the anchor is the last token whose feature is not known yet; drafts follow it; the target reads anchor and drafts
once; the accepted drafts are kept, plus the target's own next token, which is the next anchor.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.decode.clock import NO_TIME, RoundClock, Shares
from draftsmith.decode.methods import Chain, Method
from draftsmith.decode.sampling import GREEDY, Dice, Sampling
from draftsmith.decode.states import TargetState
from draftsmith.decode.verify import verify
from draftsmith.drafter.model import Drafter
from draftsmith.target.load import Target

# Called with a round's tokens, all but the last of which were drafted (all of them, if the round was cut short).
OnRound = Callable[[list[int], int], None]


@dataclass(frozen=True, slots=True)
class Generation:
    """What one prompt gave. `rounds` holds the tokens each round produced; the first token belongs to the prefill.

    `decode_s` is the time after the first token was known, `shares` where the rounds spent it. Plain decoding has no
    rounds.
    """

    tokens: tuple[int, ...]
    decode_s: float
    rounds: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()  # drafted tokens kept in each round
    verified: tuple[int, ...] = ()  # rows that the target read in each round
    shares: Shares = NO_TIME


def speculative_generate(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], max_new_tokens: int
) -> Generation:
    """Greedy decoding with a drafter's chains; the tokens are those of `plain_generate`."""
    return decode(target, Chain(drafter), prompt_ids, max_new_tokens)


@torch.inference_mode()
def decode(
    target: Target,
    method: Method,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    on_round: OnRound | None = None,
) -> Generation:
    """Speculative decoding: greedy, the tokens of `plain_generate`; else tokens distributed as those are.

    Args:
        target: the model that decides.
        method: what drafts, on the same device.
        prompt_ids: at least one token.
        max_new_tokens: counts the first token; at least 1.
        sampling: the distribution to draw from.
        seed: of the draws.
        on_round: called with the first token and 0, then with every round's tokens and how many of them were drafted.

    Raises:
        InputError: the target cannot take rejected tokens back, or cannot read what the method drafts.
    """
    length = len(prompt_ids) + max_new_tokens
    reader = TargetState(target, length + method.rows)
    dice = Dice(sampling, seed, target.device)
    proposer = method.start(target, length, dice)
    prompt_T = torch.tensor(prompt_ids, device=target.device)
    logits_RV, features_TF = reader.forward(prompt_T, features=method.needs_features, last_only=True)
    reader.cache.forget(0)
    text = [*prompt_ids, int(dice.choose(logits_RV)[0])]
    clock, began = RoundClock(target.device), time.perf_counter()
    rounds: list[int] = []
    accepted: list[int] = []
    verified: list[int] = []
    if on_round is not None:
        on_round(text[-1:], 0)
    while len(text) < length and text[-1] not in target.stop_ids:
        clock.start()
        proposal = proposer.propose(text, features_TF, min(method.block_size, length - len(text) + 1))
        clock.drafted()
        logits_RV, features_TF = reader.forward(proposal.ids_R, features=method.needs_features, tree=proposal.shape)
        clock.verified()
        verdict = verify(proposal, logits_RV, dice)  # the round's one wait for the device
        produced = _cut(verdict.tokens[: length - len(text)], target.stop_ids)
        rows = verdict.rows[: len(produced)]
        reader.cache.keep(rows, len(logits_RV))
        features_TF = _rows_of(features_TF, rows)
        text += produced
        rounds.append(len(produced))
        accepted.append(min(len(verdict.rows) - 1, len(produced)))
        verified.append(len(logits_RV))
        clock.stop()
        if on_round is not None:
            on_round(produced, accepted[-1])
    return Generation(
        tokens=tuple(text[len(prompt_ids) :]),
        decode_s=time.perf_counter() - began,
        rounds=tuple(rounds),
        accepted=tuple(accepted),
        verified=tuple(verified),
        shares=clock.shares(),
    )


def _cut(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """Up to the first stop token, that included."""
    stop = next((place for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[: stop + 1]


def _rows_of(features_RF: torch.Tensor | None, rows: list[int]) -> torch.Tensor | None:
    """Features of the rows that stay; a chain's are a slice."""
    if features_RF is None or rows[-1] == len(rows) - 1:
        return features_RF if features_RF is None else features_RF[: len(rows)]
    return features_RF[torch.tensor(rows, device=features_RF.device)]


@torch.inference_mode()
def plain_generate(
    target: Target, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling = GREEDY, seed: int = 0
) -> Generation:
    """Decoding one token per forward: what speculative decoding is compared with."""
    reader = TargetState(target, len(prompt_ids) + max_new_tokens)
    dice = Dice(sampling, seed, target.device)
    logits_1V, _ = reader.forward(torch.tensor(prompt_ids, device=target.device), features=False, last_only=True)
    token_1 = dice.choose(logits_1V)
    tokens = token_1.tolist()
    began = time.perf_counter()
    while len(tokens) < max_new_tokens and tokens[-1] not in target.stop_ids:
        reader.cache.forget(0)
        logits_1V, _ = reader.forward(token_1, features=False)
        token_1 = dice.choose(logits_1V)
        tokens += token_1.tolist()
    return Generation(tuple(tokens), time.perf_counter() - began)
