"""Where blocks begin. Anchors are a function of (seed, epoch, document) alone, so no topology or packing moves them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.nouns import Blocks, Row


def eligible_anchors(supervised_T: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions of a document that may be an anchor: own and next token supervised, and a token before it."""
    both = supervised_T[:-1] & supervised_T[1:]
    both[:1] = False
    return np.flatnonzero(both).astype(np.int64)


def anchor_count(eligible: int, density: float) -> int:
    """How many anchors a document with `eligible` positions gets each epoch: max(1, floor(density * eligible))."""
    return max(1, int(density * eligible))


def draw_anchors(
    supervised_T: NDArray[np.bool_], *, density: float, seed: int, epoch: int, document: int
) -> NDArray[np.int64]:
    """Sorted anchors of one document for one epoch, without repetition.

    Raises:
        ValueError: the document has no eligible position (the data room rejects such documents).
    """
    eligible = eligible_anchors(supervised_T)
    if not len(eligible):
        raise ValueError(f"document {document} has no two neighbouring supervised tokens, so no anchor")
    random = np.random.default_rng([seed, epoch, document])
    return np.sort(random.choice(eligible, anchor_count(len(eligible), density), replace=False))


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """Loss weight of each slot [B]: 0 for the anchor, exp(-(k - 1) / gamma) for slot k (DFlash, section 4)."""
    k = torch.arange(block_size)
    weights = torch.exp(-(k - 1) / gamma)
    weights[0] = 0
    return weights


def split_blocks(blocks: Blocks) -> tuple[Blocks, Blocks]:
    """The first and the second half of at least two blocks, each with its labels: a loss is the sum of theirs."""
    size, middle = blocks.tokens_NB.shape[1], len(blocks.anchors) // 2
    first_L = blocks.learned_L < middle * size
    return (
        Blocks(
            tokens_NB=blocks.tokens_NB[:middle],
            positions_NB=blocks.positions_NB[:middle],
            anchors=blocks.anchors[:middle],
            starts=blocks.starts[:middle],
            learned_L=blocks.learned_L[first_L],
            labels_L=blocks.labels_L[first_L],
            weights_L=blocks.weights_L[first_L],
        ),
        Blocks(
            tokens_NB=blocks.tokens_NB[middle:],
            positions_NB=blocks.positions_NB[middle:],
            anchors=blocks.anchors[middle:],
            starts=blocks.starts[middle:],
            learned_L=blocks.learned_L[~first_L] - middle * size,
            labels_L=blocks.labels_L[~first_L],
            weights_L=blocks.weights_L[~first_L],
        ),
    )


def make_blocks(row: Row, *, block_size: int, mask_token: int, gamma: float) -> Blocks:
    """The blocks of a row (host memory): tokens shown, positions, and the labels to learn with their weights."""
    slots_NB = row.anchors_N[:, None] + torch.arange(block_size)
    ends = torch.tensor([span.stop for span in row.spans])
    inside_NB = slots_NB < ends[torch.bucketize(row.anchors_N, ends, right=True)][:, None]
    slots_NB = slots_NB.clamp(max=len(row.tokens_T) - 1)
    unbroken_NB = (row.supervised_T[slots_NB] & inside_NB).cumprod(1)
    weights_NB = slot_weights(block_size, gamma) * unbroken_NB
    learned_L = weights_NB.flatten().nonzero()[:, 0]
    tokens_NB = torch.full_like(slots_NB, mask_token)
    tokens_NB[:, 0] = row.tokens_T[row.anchors_N]
    return Blocks(
        tokens_NB=tokens_NB,
        positions_NB=row.positions_T[row.anchors_N][:, None] + torch.arange(block_size),
        anchors=tuple(row.anchors_N.tolist()),
        starts=tuple(row.starts_N.tolist()),
        learned_L=learned_L,
        labels_L=row.tokens_T[slots_NB].flatten()[learned_L],
        weights_L=weights_NB.flatten()[learned_L],
    )
