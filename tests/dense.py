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
    mask = []
    for block, anchor, start, k in slots:
        position = anchor + k
        context_seen = [start <= key < anchor and (window is None or position - window < key) for key in range(context)]
        slots_seen = [
            other == block and (window is None or position - window < first + j <= position)
            for other, first, _, j in slots
        ]
        mask.append(context_seen + slots_seen)
    return torch.tensor(mask)


def dense_attention(mask: Tensor, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
    groups = q.shape[0] // kc.shape[0]
    k = torch.cat([kc, kb], 1).repeat_interleave(groups, 0)
    v = torch.cat([vc, vb], 1).repeat_interleave(groups, 0)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
