"""Exact attention for all blocks of a row, a chunk of neighbouring blocks at a time. Needs no compiler, any device.

Sorted neighbours share almost the whole of their context, so one fused call over [context up to the chunk's last
anchor; the chunk's own slots] with a small additive mask does little work in vain, and no mask or score ever covers
the row's [Q, T] grid: memory is bounded by the chunk. Query groups (GQA) are folded into the chunk's query rows, so
keys and values are never repeated.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.drafter.attention.kernels import chunk_backward, chunk_forward
from draftsmith.drafter.attention.layout import BlockLayout, block_mask, context_mask

CHUNK_SLOTS = 128  # slots per chunk: 16 blocks of 8. Of 64 to 384 the best or within 5 % of it (docs/lab-notebook.md).
KEPT_MASK_BYTES = 2**24  # masks of a row are kept for all layers, forward and backward, while they are this small


class Chunk(NamedTuple):
    """Neighbouring blocks that share a call."""

    blocks: slice
    slots: slice  # of the row's Q slots
    keys: slice  # of the row's T context positions


class ChunkPlan:
    """How the blocks of a row are cut into chunks, for all layers that share a window. Used by one thread.

    Masks are additive, [1, 1, groups * slots, keys + slots]. They are kept as long as all of them together stay
    below `KEPT_MASK_BYTES`; beyond, each is built when it is used, so memory stays linear in the row's length.
    """

    def __init__(self, layout: BlockLayout, groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.groups, self.dtype, self.device = layout, groups, dtype, device
        size, count = layout.block_size, len(layout.anchors)
        per_chunk = max(1, CHUNK_SLOTS // size)
        self.chunks = [self._chunk(first, min(first + per_chunk, count)) for first in range(0, count, per_chunk)]
        self._diagonals: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}
        numel = sum(groups * _length(c.slots) * (_length(c.keys) + _length(c.slots)) for c in self.chunks)
        self._keeps = numel * dtype.itemsize <= KEPT_MASK_BYTES

    def __iter__(self) -> Iterator[tuple[Chunk, Tensor]]:
        for number, chunk in enumerate(self.chunks):
            mask = self._kept.get(number)
            if mask is None:
                mask = self._mask(chunk)
                if self._keeps:
                    self._kept[number] = mask
            yield chunk, mask

    def _chunk(self, first: int, last: int) -> Chunk:
        layout = self.layout
        low = layout.starts[first]  # documents lie in order, so the first block's begins first
        if layout.window is not None:
            low = max(low, layout.anchors[first] - layout.window + 1)
        slots = slice(first * layout.block_size, last * layout.block_size)
        return Chunk(slice(first, last), slots, slice(low, layout.anchors[last - 1]))

    def _mask(self, chunk: Chunk) -> Tensor:
        blocks, slots, keys = _length(chunk.blocks), _length(chunk.slots), _length(chunk.keys)
        if blocks not in self._diagonals:
            seen = block_mask(self.layout, blocks, self.device).view(blocks, -1, slots)
            self._diagonals[blocks] = self._additive(seen)
        mask = torch.empty(
            self.groups, blocks, self.layout.block_size, keys + slots, dtype=self.dtype, device=self.device
        )
        mask[..., :keys] = self._additive(context_mask(self.layout, chunk.blocks, chunk.keys, self.device))
        mask[..., keys:] = self._diagonals[blocks]
        return mask.view(1, 1, self.groups * slots, keys + slots)

    def _additive(self, seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


class _Blockwise(torch.autograd.Function):
    """Saves the output and one log-sum-exp per chunk; concatenated keys are built again in the backward."""

    @staticmethod
    def forward(ctx: Any, plan: ChunkPlan, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        heads, _, dim = q.shape
        kv_heads = kc.shape[0]
        folded_q = q.view(kv_heads, heads // kv_heads, -1, dim)
        out = torch.empty_like(folded_q)
        sums: list[Tensor | None] = []
        for (_, slots, keys), mask in plan:
            k = torch.cat([kc[:, keys], kb[:, slots]], 1)[None]
            v = torch.cat([vc[:, keys], vb[:, slots]], 1)[None]
            chunk, logsumexp = chunk_forward(_fold(folded_q, slots), k, v, mask)
            out[:, :, slots] = chunk.view(kv_heads, heads // kv_heads, -1, dim)
            sums.append(logsumexp)
        ctx.plan, ctx.sums = plan, sums
        ctx.save_for_backward(q, kc, vc, kb, vb, out)
        return out.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, kc, vc, kb, vb, out = ctx.saved_tensors
        heads, _, dim = q.shape
        kv_heads = kc.shape[0]
        folded_q = q.view(kv_heads, heads // kv_heads, -1, dim)
        folded_grad = grads[0].reshape(folded_q.shape)
        dq, dkb, dvb = torch.empty_like(folded_q), torch.empty_like(kb), torch.empty_like(vb)
        dkc, dvc = torch.zeros_like(kc), torch.zeros_like(vc)
        for ((_, slots, keys), mask), logsumexp in zip(ctx.plan, ctx.sums, strict=True):
            k = torch.cat([kc[:, keys], kb[:, slots]], 1)[None]
            v = torch.cat([vc[:, keys], vb[:, slots]], 1)[None]
            chunk_q, chunk_k, chunk_v = chunk_backward(
                _fold(folded_grad, slots), _fold(folded_q, slots), k, v, mask, _fold(out, slots), logsumexp
            )
            width = keys.stop - keys.start
            dq[:, :, slots] = chunk_q.view(kv_heads, heads // kv_heads, -1, dim)
            dkc[:, keys] += chunk_k[0, :, :width]
            dvc[:, keys] += chunk_v[0, :, :width]
            dkb[:, slots], dvb[:, slots] = chunk_k[0, :, width:], chunk_v[0, :, width:]
        return None, dq.view_as(q), dkc, dvc, dkb, dvb


def _fold(x: Tensor, slots: slice) -> Tensor:
    """[G, groups, Q, D] -> [1, G, groups * slots, D]: the query heads of a group become more rows of one head."""
    return x[:, :, slots].reshape(1, x.shape[0], -1, x.shape[-1])


def blockwise_attention(plan: ChunkPlan, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
    """Attention output [A, Q, D] of every slot of the row.

    Args:
        plan: the row's anchors and this layer's window, cut into chunks for A / G query heads per key head.
        q: queries of the slots, [A, Q, D], rotated. Queries and keys are computed in the values' dtype.
        kc, vc: keys (rotated) and values of the context features, [G, T, D]; G divides A.
        kb, vb: keys (rotated) and values of the slots, [G, Q, D].
    """
    q, kc, kb = (tensor.to(vc.dtype) for tensor in (q.contiguous(), kc, kb))
    out: Tensor = _Blockwise.apply(plan, q, kc, vc, kb, vb)  # type: ignore[no-untyped-call]
    return out
