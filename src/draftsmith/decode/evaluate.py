"""τ, speed-up and losslessness, measured by decoding: never estimated from training accuracy."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from draftsmith.decode.speculate import Generation, TargetState, plain_generate, speculative_generate
from draftsmith.drafter.model import Drafter
from draftsmith.target.load import Target


@dataclass(frozen=True, slots=True)
class Tie:
    """A place in lower precision where both tokens are right: the target's own gap is below its own noise."""

    prompt: int
    position: int
    gap: float
    noise: float


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Results over all prompts; the JSON keys of `draftsmith eval` are these fields."""

    tau: float
    tau_per_prompt: tuple[float, ...]
    rounds_per_prompt: tuple[tuple[int, ...], ...]
    accept_per_position: tuple[float, ...]
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    lossless: bool
    ties: tuple[Tie, ...]
    prompts: int
    new_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def decoded_tau(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> float:
    """τ alone, without a baseline: for watching a run and choosing `best/`."""
    return tau([speculative_generate(target, drafter, ids, max_new_tokens) for ids in prompts])


def tau(generations: Sequence[Generation]) -> float:
    """Tokens produced in rounds / rounds, over all prompts; 1.0 if there was no round."""
    rounds = sum(len(g.rounds) for g in generations)
    return sum(sum(g.rounds) for g in generations) / rounds if rounds else 1.0


def acceptance_per_position(generations: Sequence[Generation], block_size: int) -> tuple[float, ...]:
    """Share of all rounds in which slot k's draft (k = 1..B-1) was kept."""
    accepted = [kept for g in generations for kept in g.accepted]
    return tuple(sum(kept >= k for kept in accepted) / max(1, len(accepted)) for k in range(1, block_size))


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_prompt: Callable[[int], None] | None = None,
) -> EvalReport:
    """Decodes every prompt with the drafter, plainly, and with transformers' `generate`, one after the other.

    The three alternate prompt by prompt, so a machine that slows down slows all of them. The baseline is the faster
    of the two plain ones.

    Args:
        target, drafter: on the same device.
        prompts: token ids of each prompt.
        max_new_tokens: limit per prompt, first token included.
        on_prompt: called with the number of prompts done.
    """
    drafted, plain, library_s = [], [], 0.0
    ties: list[Tie] = []
    lossless = True
    speculative_generate(target, drafter, prompts[0], min(8, max_new_tokens))  # first-call costs belong to nobody
    library_generate(target, prompts[0], min(8, max_new_tokens))
    for number, ids in enumerate(prompts):
        drafted.append(speculative_generate(target, drafter, ids, max_new_tokens))
        plain.append(plain_generate(target, ids, max_new_tokens))
        library_s += library_generate(target, ids, max_new_tokens).decode_s
        if drafted[-1].tokens != plain[-1].tokens:
            tie = _tie(target, number, ids, drafted[-1].tokens, plain[-1].tokens)
            if tie is None:
                lossless = False
            else:
                ties.append(tie)
        if on_prompt is not None:
            on_prompt(number + 1)
    after_first = [len(g.tokens) - 1 for g in drafted]
    speed = sum(after_first) / max(1e-9, sum(g.decode_s for g in drafted))
    baseline_s = min(sum(g.decode_s for g in plain), library_s)
    baseline_speed = sum(len(g.tokens) - 1 for g in plain) / max(1e-9, baseline_s)
    return EvalReport(
        tau=tau(drafted),
        tau_per_prompt=tuple(tau([g]) for g in drafted),
        rounds_per_prompt=tuple(g.rounds for g in drafted),
        accept_per_position=acceptance_per_position(drafted, drafter.config.block_size),
        tokens_per_second=speed,
        baseline_tokens_per_second=baseline_speed,
        speedup=speed / baseline_speed if baseline_speed else 1.0,
        lossless=lossless,
        ties=tuple(ties),
        prompts=len(prompts),
        new_tokens=sum(len(g.tokens) for g in drafted),
    )


class _Stamp(StoppingCriteria):  # type: ignore[misc]
    """Notes when the first token was known. Never stops anything."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first is None:
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def library_generate(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> Generation:
    """Greedy decoding by transformers' own `generate`, timed after its first token."""
    stamp = _Stamp()
    greedy = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(target.stop_ids) or None, pad_token_id=0
    )
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=greedy,
        stopping_criteria=StoppingCriteriaList([stamp]),
    )
    ended = time.perf_counter()
    assert stamp.first is not None
    return Generation(tuple(out[0, ids.shape[1] :].tolist()), (), (), ended - stamp.first)


@torch.inference_mode()
def _tie(
    target: Target, number: int, prompt: Sequence[int], drafted: Sequence[int], plain: Sequence[int]
) -> Tie | None:
    """In lower precision, is the first difference one that the target's own rounding explains? Never in fp32."""
    if target.embedding_VH.dtype == torch.float32:
        return None
    place = next((i for i, (a, b) in enumerate(zip(drafted, plain, strict=False)) if a != b), None)
    if place is None or place == 0:
        return None
    ids = torch.tensor([*prompt, *plain[:place]], device=target.device)
    whole, _ = TargetState(target).forward(ids, features=False)
    reader = TargetState(target)
    reader.forward(ids[:-1], features=False, last_only=True)
    single, _ = reader.forward(ids[-1:], features=False)
    noise = float((whole[-1].float() - single[-1].float()).abs().max())
    top = single[-1].float().topk(2).values
    gap = float(top[0] - top[1])
    return Tie(number, place, gap, noise) if gap < noise else None
