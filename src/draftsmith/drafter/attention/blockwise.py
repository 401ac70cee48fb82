"""Exact attention for all blocks of a row, a chunk of neighbouring blocks at a time. Needs no compiler, any device.

Sorted neighbours share almost the whole of their context. So a run of chunks first attends to what all its blocks see,
without a mask, and then each chunk to [the rest of the context up to its last anchor; its own slots] under a small
additive mask; the two are merged by their log-sum-exp. Where the kernel does not tell the log-sum-exp (not the fused
CPU one), nothing is shared and a chunk's masked call covers its whole context. No mask or score ever covers the row's
[Q, T] grid: memory is bounded by the chunk. The query heads of a key head (GQA) become neighbouring rows of one head,
slot by slot, so keys and values are never repeated and the rows of any slots are a view.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.drafter.attention.kernels import chunk_backward, chunk_forward, gives_logsumexp
from draftsmith.drafter.attention.layout import BlockLayout, block_mask, context_mask

CHUNK_SLOTS = 128  # slots per chunk: 16 blocks of 8. Of 64 to 384 the best or within 5 % of it (docs/lab-notebook.md).
RUN_ROWS = 768  # query rows per run of chunks: from here on the fused CPU kernel uses its largest tiles
KEPT_MASK_BYTES = 2**24  # masks of a row are kept for all layers, forward and backward, while they are this small


class Shared(NamedTuple):
    """A run of slots that all see the same context positions: no mask."""

    rows: slice  # of the Q * groups query rows
    keys: slice  # of the row's T context positions


class Chunk(NamedTuple):
    """Neighbouring blocks that share a masked call, over these context positions and their own slots."""

    blocks: slice
    slots: slice  # of the row's Q slots
    rows: slice
    keys: slice


class ChunkPlan:
    """How the blocks of a row are cut into chunks, for all layers that share a window. Used by one thread.

    Iterating gives each chunk with its additive mask, [1, 1, slots * groups, keys + slots]; a slot always sees itself,
    so no line of a mask is empty. Masks are kept as long as all of them together stay below `KEPT_MASK_BYTES`; beyond,
    each is built when it is used, so memory stays linear in the row's length.
    """

    def __init__(self, layout: BlockLayout, groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.groups, self.dtype, self.device = layout, groups, dtype, device
        self.shared: list[Shared] = []
        self.chunks: list[Chunk] = []
        per_run, count = max(1, RUN_ROWS // (groups * layout.block_size)), len(layout.anchors)
        for first in range(0, count, per_run):
            self._add_run(first, min(first + per_run, count))
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

    def _add_run(self, first: int, last: int) -> None:
        layout, size, rows = self.layout, self.layout.block_size, self.layout.block_size * self.groups
        one_document = layout.starts[first] == layout.starts[last - 1]
        shares = one_document and layout.window is None and gives_logsumexp(self.device)
        if shares:
            keys = slice(layout.starts[first], layout.anchors[first])
            self.shared.append(Shared(slice(first * rows, last * rows), keys))
        step = max(1, CHUNK_SLOTS // size)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            low = layout.anchors[first] if shares else layout.starts[begin]  # documents lie in order
            if layout.window is not None:
                low = max(low, layout.anchors[begin] - layout.window + 1)
            keys, slots = slice(low, layout.anchors[end - 1]), slice(begin * size, end * size)
            self.chunks.append(Chunk(slice(begin, end), slots, slice(begin * rows, end * rows), keys))

    def _mask(self, chunk: Chunk) -> Tensor:
        blocks, slots, keys = _length(chunk.blocks), _length(chunk.slots), _length(chunk.keys)
        if blocks not in self._diagonals:
            seen = block_mask(self.layout, blocks, self.device).view(blocks, -1, 1, slots)
            self._diagonals[blocks] = self._additive(seen)
        mask = torch.empty(
            blocks, self.layout.block_size, self.groups, keys + slots, dtype=self.dtype, device=self.device
        )
        seen = context_mask(self.layout, chunk.blocks, chunk.keys, self.device)
        mask[..., :keys] = self._additive(seen)[:, :, None]
        mask[..., keys:] = self._diagonals[blocks]
        return mask.view(1, 1, slots * self.groups, keys + slots)

    def _additive(self, seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


class _Blockwise(torch.autograd.Function):
    """Queries and output are [1, G, Q * groups, D], keys and values [1, G, T or Q, D]. Saves the output and its
    log-sum-exp over all that a slot sees: from these the gradients of each call follow alone."""

    @staticmethod
    def forward(ctx: Any, plan: ChunkPlan, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        out = torch.empty_like(q)
        sums = torch.empty(out.shape[:-1], dtype=torch.float32, device=q.device)
        for (_, slots, rows, keys), mask in plan:
            k, v = _joined(kc, keys, kb, slots), _joined(vc, keys, vb, slots)
            part, logsumexp = chunk_forward(_at(q, rows), k, v, mask)
            _at(out, rows).copy_(part)
            if logsumexp is not None:
                _at(sums, rows).copy_(logsumexp)
        for rows, keys in plan.shared:
            part, logsumexp = chunk_forward(_at(q, rows), _at(kc, keys), _at(vc, keys), None)
            assert logsumexp is not None, "nothing is shared without a log-sum-exp"
            _merge(_at(out, rows), _at(sums, rows), part, logsumexp)
        ctx.plan = plan
        ctx.save_for_backward(q, kc, vc, kb, vb, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, kc, vc, kb, vb, out, sums = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dkb, dvb = torch.empty_like(q), torch.empty_like(kb), torch.empty_like(vb)
        dkc, dvc = torch.zeros_like(kc), torch.zeros_like(vc)

        def gradients(rows: slice, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            return chunk_backward(_at(grad, rows), _at(q, rows), _at(out, rows), _at(sums, rows), k, v, mask)

        for (_, slots, rows, keys), mask in ctx.plan:
            part, dk, dv = gradients(rows, _joined(kc, keys, kb, slots), _joined(vc, keys, vb, slots), mask)
            _at(dq, rows).copy_(part)
            width = keys.stop - keys.start
            for d, context, own in (dk, dkc, dkb), (dv, dvc, dvb):
                _at(context, keys).add_(d[:, :, :width])
                _at(own, slots).copy_(d[:, :, width:])
        for rows, keys in ctx.plan.shared:
            part, dk, dv = gradients(rows, _at(kc, keys), _at(vc, keys), None)
            _at(dq, rows).add_(part)
            _at(dkc, keys).add_(dk)
            _at(dvc, keys).add_(dv)
        return None, dq, dkc, dvc, dkb, dvb


def _at(x: Tensor, part: slice) -> Tensor:
    """These rows, or keys, of [1, G, ..., D]: a view."""
    return x.narrow(2, part.start, part.stop - part.start)


def _joined(context: Tensor, keys: slice, own: Tensor, slots: slice) -> Tensor:
    return torch.cat([_at(context, keys), _at(own, slots)], 2)


def _merge(out: Tensor, sums: Tensor, part: Tensor, logsumexp: Tensor) -> None:
    """Adds what other keys gave: two softmax averages, weighted by their exponential sums. In place."""
    out.lerp_(part, torch.sigmoid(logsumexp - sums)[..., None].to(out.dtype))
    torch.logaddexp(sums, logsumexp, out=sums)


def blockwise_attention(plan: ChunkPlan, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
    """Attention output [A, Q, D] of every slot of the row; in memory [Q, A, D], as the next projection wants it.

    Args:
        plan: the row's anchors and this layer's window, cut into chunks for A / G query heads per key head.
        q: queries of the slots, [A, Q, D], rotated. Queries and keys are computed in the values' dtype.
        kc, vc: keys (rotated) and values of the context features, [G, T, D]; G divides A.
        kb, vb: keys (rotated) and values of the slots, [G, Q, D].
    """
    q, kc, kb = (tensor.to(vc.dtype) for tensor in (q, kc, kb))
    kv_heads, (heads, slots, dim) = kc.shape[0], q.shape
    rows = q.reshape(kv_heads, plan.groups, slots, dim).transpose(1, 2).reshape(kv_heads, -1, dim)
    out: Tensor = _Blockwise.apply(plan, *(x[None] for x in (rows, kc, vc, kb, vb)))  # type: ignore[no-untyped-call]
    return out.view(kv_heads, slots, plan.groups, dim).transpose(0, 1).reshape(slots, heads, dim).transpose(0, 1)
