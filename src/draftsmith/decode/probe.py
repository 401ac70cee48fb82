"""Asks a target, before anything is decoded, whether tokens can be taken back from it and trees read by it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decode.states import TargetState, TreeShape
from draftsmith.decode.tree import ancestors
from draftsmith.errors import InputError
from draftsmith.target.load import Target

PROMPT, SURPLUS, REST = 6, 4, 2  # tokens
TOLERANCE, LOWER_PRECISION_TOLERANCE = 1e-3, 0.1  # of the largest logit; a wrong token in the context moves far more


@torch.inference_mode()
def probe_target(target: Target, *, trees: bool = False) -> None:
    """Compares a cache that has been rolled back with a fresh one, and rows of a tree with the same tokens in a row.

    Raises:
        InputError: this target keeps states that cannot be rolled back, or does not heed a tree's mask.
    """
    ids = (torch.arange(1, PROMPT + SURPLUS + REST + 1) % target.embedding_VH.shape[0]).to(target.device)
    prompt, surplus, rest = ids[:PROMPT], ids[PROMPT:-REST], ids[-REST:]
    reader = _read(target, prompt, len(ids))
    reader.forward(surplus, features=False)
    reader.cache.keep([0], SURPLUS)
    rolled_back, _ = reader.forward(rest, features=False)
    _demand_equal(
        target,
        rolled_back[-1],
        _fresh(target, [prompt, surplus[:1], rest]),
        "its cache does not forget what it is told",
    )
    if trees:
        _check_trees(target, prompt, surplus, rest)


def _check_trees(target: Target, prompt: Tensor, surplus: Tensor, rest: Tensor) -> None:
    """Root, two children, and a child of the first."""
    reader = _read(target, prompt, len(prompt) + len(surplus) + len(rest))
    parents_N = torch.tensor([0, 0, 1], device=target.device)
    shape = TreeShape(torch.tensor([0, 1, 1, 2], device=target.device), ancestors(parents_N, 2))
    logits_RV, _ = reader.forward(surplus, features=False, tree=shape)
    problem = "it does not heed the mask of a draft tree (--tree)"
    _demand_equal(target, logits_RV[2], _fresh(target, [prompt, surplus[[0, 2]]]), problem)
    _demand_equal(target, logits_RV[3], _fresh(target, [prompt, surplus[[0, 1, 3]]]), problem)
    reader.cache.keep([0, 2], len(surplus))
    read_on, _ = reader.forward(rest, features=False)
    _demand_equal(target, read_on[-1], _fresh(target, [prompt, surplus[[0, 2]], rest]), problem)


def _read(target: Target, ids: Tensor, capacity: int) -> TargetState:
    reader = TargetState(target, capacity)
    reader.forward(ids, features=False, last_only=True)
    reader.cache.forget(0)
    return reader


def _fresh(target: Target, parts: Sequence[Tensor]) -> Tensor:
    """Logits [V] after all the parts, read at once."""
    ids = torch.cat(tuple(parts))
    return TargetState(target, len(ids)).forward(ids, features=False, last_only=True)[0][-1]


def _demand_equal(target: Target, found_V: Tensor, expected_V: Tensor, problem: str) -> None:
    if not expected_V.isfinite().all():
        raise InputError(
            f"target.model {target.spec.model!r} computes NaN or infinite logits; its weights are damaged or too large "
            "for their dtype: copy the model again"
        )
    share = float((found_V.float() - expected_V.float()).abs().max() / expected_V.float().abs().max())
    allowed = TOLERANCE if target.embedding_VH.dtype == torch.float32 else LOWER_PRECISION_TOLERANCE
    if not share <= allowed:
        raise InputError(
            f"target.model {target.config.model_type}: {problem} (logits are off by {share:.1%} of the largest), so "
            "this target cannot verify drafts"
        )
