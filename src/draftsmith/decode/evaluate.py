"""τ, speed-up and losslessness, measured by decoding: never estimated from training accuracy."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from draftsmith.compile import guard
from draftsmith.decode.figures import Figures, Tie, figures, speed, tau
from draftsmith.decode.methods import Chain, Method
from draftsmith.decode.probe import probe_target
from draftsmith.decode.sampling import GREEDY, Sampling
from draftsmith.decode.speculate import Generation, decode, plain_generate, speculative_generate
from draftsmith.decode.states import TargetState
from draftsmith.drafter.model import Drafter
from draftsmith.target.load import Target

WARM_UP_TOKENS = 8


@dataclass(frozen=True, eq=False, slots=True)
class Contender:
    """A way to draft with the target it drafts for: the same model for all, with the taps its drafter wants."""

    target: Target
    method: Method


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One way of drafting against plain decoding; `others` are further ones, by name, from the same run."""

    main: Figures
    baseline_tokens_per_second: float
    prompts: int
    others: Mapping[str, Figures] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The keys of `draftsmith eval --json`: those of the main figures and, under `baselines`, the others'."""
        return asdict(self.main) | {
            "baseline_tokens_per_second": self.baseline_tokens_per_second,
            "prompts": self.prompts,
            "baselines": {name: asdict(other) for name, other in self.others.items()},
        }


def decoded_tau(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    before_prompt: Callable[[], None] = lambda: None,
) -> float:
    """τ alone, without a baseline: for watching a run and choosing `best/`."""
    generations = []
    for ids in prompts:
        before_prompt()
        generations.append(speculative_generate(target, drafter, ids, max_new_tokens))
    return tau(generations)


def evaluate(
    target: Target,
    method: Method | Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    others: Mapping[str, Contender] | None = None,
    on_prompt: Callable[[int], None] | None = None,
) -> EvalReport:
    """Decodes every prompt with each method, plainly, and with transformers' `generate`, one after the other.

    All alternate prompt by prompt, so a machine that slows down slows all of them. The baseline is the faster of the
    two plain ones. Prompt i is drawn with seed i.

    Args:
        target: the model that decides.
        method: what drafts, on the same device; a drafter alone means its chains.
        prompts: token ids of each prompt.
        max_new_tokens: limit per prompt, first token included.
        sampling: greedy, or the distribution to draw from.
        others: further methods to measure in the same run.
        on_prompt: called with the number of prompts done.

    Raises:
        InputError: the target cannot take rejected tokens back, or cannot read trees.
    """
    main = Contender(target, Chain(method) if isinstance(method, Drafter) else method)
    runs = {"": main, **(others or {})}
    drafted: dict[str, list[Generation]] = {name: [] for name in runs}
    plain, library = [], []
    probe_target(target, trees=any(run.method.branches for run in runs.values()))
    for run in runs.values():  # first-call costs belong to nobody
        decode(run.target, run.method, prompts[0], min(WARM_UP_TOKENS, max_new_tokens), sampling)
    library_generate(target, prompts[0], min(WARM_UP_TOKENS, max_new_tokens), sampling)
    for number, ids in enumerate(prompts):
        for name, run in runs.items():
            drafted[name].append(decode(run.target, run.method, ids, max_new_tokens, sampling, number))
        plain.append(plain_generate(target, ids, max_new_tokens, sampling, number))
        library.append(library_generate(target, ids, max_new_tokens, sampling))
        if on_prompt is not None:
            on_prompt(number + 1)
    baseline = max(speed(plain), speed(library))

    def result(name: str) -> Figures:
        lossless, ties = _compared(target, prompts, drafted[name], plain) if sampling.greedy else (None, [])
        return figures(drafted[name], runs[name].method.block_size, baseline, lossless, ties)

    return EvalReport(result(""), baseline, len(prompts), {name: result(name) for name in runs if name})


class _Stamp(StoppingCriteria):  # type: ignore[misc]
    """Notes when the first token was known. Never stops anything."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first is None:
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def library_generate(
    target: Target, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling = GREEDY
) -> Generation:
    """Decoding by transformers' own `generate`, timed after its first token."""
    stamp = _Stamp()
    how: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        how = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    with guard.shared():
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                max_new_tokens=max_new_tokens, eos_token_id=list(target.stop_ids) or None, pad_token_id=0, **how
            ),
            stopping_criteria=StoppingCriteriaList([stamp]),
        )
    ended = time.perf_counter()
    assert stamp.first is not None
    return Generation(tuple(out[0, ids.shape[1] :].tolist()), ended - stamp.first)


def _compared(
    target: Target, prompts: Sequence[Sequence[int]], drafted: Sequence[Generation], plain: Sequence[Generation]
) -> tuple[bool, list[Tie]]:
    """Whether all tokens are those of plain decoding but for ties, and the ties."""
    lossless, ties = True, []
    for number, (ids, ours, reference) in enumerate(zip(prompts, drafted, plain, strict=True)):
        if ours.tokens != reference.tokens:
            tie = _tie(target, number, ids, ours, reference.tokens)
            lossless = lossless and tie is not None
            ties += [tie] if tie is not None else []
    return lossless, ties


def _tie(target: Target, number: int, prompt: Sequence[int], drafted: Generation, plain: Sequence[int]) -> Tie | None:
    """In lower precision, is the first difference one that the target's own rounding explains? Never in fp32.

    The same tokens are read again one by one and in the rounds' blocks. `noise` is by how much the difference of any
    two logits there depends on that.
    """
    if target.embedding_VH.dtype == torch.float32:
        return None
    place = next((i for i, (a, b) in enumerate(zip(drafted.tokens, plain, strict=False)) if a != b), None)
    if place is None or place == 0:
        return None
    single_V = _logits_in_rounds(target, prompt, plain[:place], [1] * place, [1] * place)
    block_V = _logits_in_rounds(target, prompt, plain[:place], drafted.rounds, drafted.verified)
    noise = float((block_V - single_V).max() - (block_V - single_V).min())
    top = single_V.topk(2).values
    gap = float(top[0] - top[1])
    return Tie(number, place, gap, noise) if gap <= noise else None


@torch.inference_mode()
def _logits_in_rounds(
    target: Target, prompt: Sequence[int], tokens: Sequence[int], kept: Sequence[int], verified: Sequence[int]
) -> torch.Tensor:
    """Logits [V] after the last of `tokens`, read in blocks of `verified` rows of which `kept` stay."""
    reader = TargetState(target, len(prompt) + len(tokens) + max(verified))
    reader.forward(torch.tensor(prompt, device=target.device), features=False, last_only=True)
    reader.cache.forget(0)
    done = 0
    for stay, rows in zip(kept, verified, strict=True):
        block = list(tokens[done : done + min(stay, rows)])
        ids_R = torch.tensor(block + block[-1:] * (rows - len(block)), device=target.device)
        logits_RV, _ = reader.forward(ids_R, features=False)
        done += len(block)
        if done == len(tokens):
            return logits_RV[len(block) - 1].float()
        reader.cache.keep(range(len(block)), rows)
    raise AssertionError(f"the rounds hold {done} of {len(tokens)} tokens")
