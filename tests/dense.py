"""The reference every attention backend is compared with: one boolean mask over everything, plain softmax.

Written from the rules alone (who may see whom, slot by slot), sharing no code with the product.
"""

import torch
from torch import Tensor


def dense_mask(anchors: list[int], starts: list[int], size: int, window: int | None, context: int) -> Tensor:
    """Bool [N * B, context + N * B]."""
    slots = [
        (n, anchor, start, k)
        for n, (anchor, start) in enumerate(zip(anchors, starts, strict=True))
        for k in range(size)
    ]
    mask = torch.zeros(len(slots), context + len(slots), dtype=torch.bool)
    for row, (block, anchor, start, k) in enumerate(slots):
        position = anchor + k
        for key in range(context):
            near = window is None or position - window < key
            mask[row, key] = start <= key < anchor and near
        for column, (other, _, _, j) in enumerate(slots):
            causal = window is None or position - window < anchor + j <= position
            mask[row, context + column] = other == block and causal
    return mask


def dense_attention(mask: Tensor, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
    groups = q.shape[0] // kc.shape[0]
    k = torch.cat([kc, kb], 1).repeat_interleave(groups, 0)
    v = torch.cat([vc, vb], 1).repeat_interleave(groups, 0)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
