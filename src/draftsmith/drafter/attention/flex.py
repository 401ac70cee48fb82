"""PyTorch's flex attention over all blocks of a row, compiled through the guard for one shape. For CUDA devices.

Rows are padded to the packer's budgets, so every row of a run has the shape of the warm-up. Who sees whom reaches the
kernel as data: two intervals of keys per slot, and from these, tile by tile, what the kernel may leave out, must mask
or may take whole. No [slots, keys] grid exists anywhere, and a new row compiles nothing.

Keys are [context; slots]: context position t is key t, slot q is key `context + q`, both parts padded to whole tiles.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.compile import guard
from draftsmith.drafter.attention.backend import Backend
from draftsmith.drafter.attention.layout import BlockLayout, slot_intervals

TILE = 128  # slots and keys of a tile, the kernel's own default
MIN_HEAD_DIM = 16  # the CUDA kernel takes no smaller heads


class FlexPlan(NamedTuple):
    """A row's mask and its padded sizes, for all layers that share a window."""

    mask: BlockMask
    tokens: int
    slots: int


def flex_backend(row_tokens: int, row_anchors: int) -> Backend:
    """Flex attention for rows of at most `row_tokens` tokens and `row_anchors` blocks, which is what all are padded to.

    Made once per run, before its threads: it loads the compiler, and whoever shares the backend shares compiled code.
    The signature depends on device, dtype and grad mode alone, not on the row or the window.
    """
    compiled = guard.compile(flex_attention)

    def plan(layout: BlockLayout, groups: int, dtype: torch.dtype, device: torch.device) -> FlexPlan:
        assert len(layout.anchors) <= row_anchors, "the packer keeps the anchor budget"
        tokens, slots = whole_tiles(row_tokens), whole_tiles(row_anchors * layout.block_size)
        return FlexPlan(build_mask(layout, tokens, slots, device), tokens, slots)

    def attend(plan: FlexPlan, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        q, kc, kb = (tensor.to(vc.dtype) for tensor in (q, kc, kb))
        keys, values = (_padded([context, own], [plan.tokens, plan.slots]) for context, own in ((kc, kb), (vc, vb)))
        out: Tensor = compiled(_padded([q], [plan.slots]), keys, values, block_mask=plan.mask, enable_gqa=True)
        return out[0, :, : q.shape[1]]

    return Backend(plan, attend, compiles=True)


def whole_tiles(length: int) -> int:
    """Rounded up to a multiple of `TILE`."""
    return -(-length // TILE) * TILE


def _padded(parts: list[Tensor], lengths: list[int]) -> Tensor:
    """Parts [heads, length, D], each filled up with zeros to its length, as one contiguous [1, heads, sum, D]."""
    pieces = []
    for part, length in zip(parts, lengths, strict=True):
        assert part.shape[1] <= length, "the packer keeps the token budget"
        pieces += [part, part.new_zeros(part.shape[0], length - part.shape[1], part.shape[2])]
    return torch.cat(pieces, 1)[None]


def build_mask(layout: BlockLayout, tokens: int, slots: int, device: torch.device) -> BlockMask:
    """The mask of a row padded to `tokens` context keys and `slots` slots, both whole tiles.

    Tables of tiles are made on the host from the intervals' ends; the largest has an entry per pair of tiles. A padded
    slot sees itself alone, so no slot is without a key.
    """
    intervals_4Q = _padded_intervals(layout, tokens, slots)
    touched, covered = _tiles(intervals_4Q, (tokens + slots) // TILE)
    intervals = torch.from_numpy(intervals_4Q).to(device)

    def mask_mod(batch: Tensor, head: Tensor, slot: Tensor, key: Tensor) -> Tensor:
        in_context = (key >= intervals[0, slot]) & (key < intervals[1, slot])
        in_block = (key >= intervals[2, slot]) & (key < intervals[3, slot])
        return in_context | in_block

    return BlockMask.from_kv_blocks(
        *_ordered(touched & ~covered),
        *_ordered(covered),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(slots, tokens + slots),
    ).to(device)


def _padded_intervals(layout: BlockLayout, tokens: int, slots: int) -> NDArray[np.int32]:
    """`slot_intervals` in keys, for padded slots too: [4, slots]."""
    found = slot_intervals(layout)
    own = tokens + np.arange(slots)
    padded = np.stack([np.zeros_like(own), np.zeros_like(own), own, own + 1])
    padded[:2, : found.shape[1]] = found[:2]
    padded[2:, : found.shape[1]] = found[2:] + tokens
    return padded.astype(np.int32)


def _tiles(intervals_4Q: NDArray[np.int32], tiles: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Bool [slot tiles, key tiles] each: does any slot of the tile see any of its keys? Do all see all?"""
    touching = np.zeros((intervals_4Q.shape[1] // TILE, tiles), np.int64)
    covering = np.zeros_like(touching)
    for low_Q, high_Q in (intervals_4Q[:2], intervals_4Q[2:]):
        some = low_Q < high_Q
        touching += _slots_over(low_Q // TILE, np.where(some, -(-high_Q // TILE), low_Q // TILE), tiles)
        covering += _slots_over(-(-low_Q // TILE), high_Q // TILE, tiles)
    return touching > 0, covering == TILE


def _slots_over(first_Q: NDArray[np.int32], stop_Q: NDArray[np.int32], tiles: int) -> NDArray[np.int64]:
    """[slot tiles, key tiles]: how many slots of the one have the other in their [first, stop)?"""
    rows = len(first_Q) // TILE
    row_Q = np.arange(len(first_Q)) // TILE * (tiles + 1)
    some = first_Q < stop_Q
    begins, ends = (np.bincount((row_Q + edge)[some], minlength=rows * (tiles + 1)) for edge in (first_Q, stop_Q))
    counts: NDArray[np.int64] = (begins - ends).reshape(rows, tiles + 1).cumsum(1)[:, :-1]
    return counts


def _ordered(table: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Per row how many are set [1, 1, rows], and their columns first [1, 1, rows, columns], int32."""
    count = torch.from_numpy(table.sum(1).astype(np.int32))
    columns = torch.from_numpy(np.argsort(~table, axis=1, kind="stable").astype(np.int32))
    return count[None, None], columns[None, None]
