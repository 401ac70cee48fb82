"""Loss v1: weighted cross-entropy through the target's frozen head, in chunks, in fp32.

The head is frozen, so the gradient that matters is the one of the hidden states, and it is known as soon as the
logits are: each chunk of labels computes its logits, its loss and its gradient at once and forgets the logits. So
`[labels, V]` never exists, nothing is computed twice, and the cost is two matrix products.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.nouns import Blocks

CHUNK_LOGITS = 2**20  # logits per chunk: 4 MiB in fp32, which stays in a core's cache,
MIN_CHUNK_LABELS = 128  # but enough labels for an efficient matrix product with a large vocabulary


@dataclass(frozen=True, slots=True)
class HeadScaling:
    """Between `hidden @ head.T` and the logits: `cap * tanh(multiplier * x / cap)`, as dflash 0.1.0 does it."""

    multiplier: float = 1.0
    softcap: float | None = None

    def logits(self, raw_V: Tensor) -> Tensor:
        scaled = raw_V * self.multiplier if self.multiplier != 1.0 else raw_V
        return torch.tanh(scaled / self.softcap) * self.softcap if self.softcap else scaled

    def slope(self, logits_V: Tensor) -> Tensor | float | None:
        """Derivative of the logits by the raw products; None stands for 1."""
        if self.softcap:
            return self.multiplier * (1 - (logits_V / self.softcap) ** 2)
        return self.multiplier if self.multiplier != 1.0 else None


@dataclass(frozen=True, eq=False, slots=True)
class LossSum:
    """Sums over the labels of one row, to be added over rows and replicas and divided once."""

    loss: Tensor  # scalar, carries the gradient
    weight: Tensor  # scalar
    correct_B: Tensor  # labels whose logit is the largest, per slot
    count_B: Tensor  # labels, per slot


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_LH: Tensor, labels_L: Tensor, weights_L: Tensor, head_VH: Tensor, scaling: HeadScaling
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.float32, device=hidden_LH.device)
        correct_L = torch.empty_like(labels_L, dtype=torch.bool)
        grad_LH = torch.empty_like(hidden_LH)
        size = chunk_labels(head_VH.shape[0])
        for start in range(0, len(labels_L), size):
            part = slice(start, start + size)
            logits_LV = scaling.logits((hidden_LH[part] @ head_VH.T).float())
            slope_LV = scaling.slope(logits_LV)
            weight_L1, label_L1 = weights_L[part, None], labels_L[part, None]
            wanted_L1 = logits_LV.gather(1, label_L1)
            top_L1 = logits_LV.amax(-1, keepdim=True)
            correct_L[part] = (wanted_L1 == top_L1)[:, 0]
            exp_LV = logits_LV.sub_(top_L1).exp_()
            sum_L1 = exp_LV.sum(-1, keepdim=True)
            total += (weight_L1 * (sum_L1.log() + top_L1 - wanted_L1)).sum()
            grad_LV = exp_LV.mul_(weight_L1 / sum_L1).scatter_add_(1, label_L1, -weight_L1)
            grad_LV = grad_LV if slope_LV is None else grad_LV.mul_(slope_LV)
            torch.mm(grad_LV.to(head_VH.dtype), head_VH, out=grad_LH[part])
        ctx.save_for_backward(grad_LH)
        return total, correct_L

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_LH,) = ctx.saved_tensors
        return grads[0] * grad_LH, None, None, None, None


def block_loss(hidden_QH: Tensor, blocks: Blocks, head_VH: Tensor, scaling: HeadScaling) -> LossSum:
    """Sum of weighted nats over the labels of a row, with counts per slot.

    Args:
        hidden_QH: the drafter's output for the row's Q = N * B slots, after its final norm.
        blocks: labels and weights, same device.
        head_VH: the target's output embedding, frozen.
        scaling: multiplier and soft-cap of the logits, as the checkpoint declares them.
    """
    loss, correct_L = _FrozenHeadCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_QH.index_select(0, blocks.learned_L).to(head_VH.dtype),
        blocks.labels_L,
        blocks.weights_L,
        head_VH,
        scaling,
    )
    size = blocks.tokens_NB.shape[1]
    slot_L = blocks.learned_L % size
    return LossSum(
        loss=loss,
        weight=blocks.weights_L.sum(),
        correct_B=torch.bincount(slot_L, correct_L.float(), minlength=size),
        count_B=torch.bincount(slot_L, minlength=size),
    )


def chunk_labels(vocab_size: int) -> int:
    """Labels whose logits exist at the same time."""
    return max(MIN_CHUNK_LABELS, CHUNK_LOGITS // vocab_size)


def default_gamma(block_size: int) -> float:
    """Decay of the slot weights. The paper gives 7, 5, 4 for B = 16, 10, 8; this is the line through each pair."""
    return min(block_size / 2, 5 + (block_size - 10) / 3)
