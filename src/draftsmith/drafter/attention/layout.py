"""Who sees whom: one interval of context per slot, and the slots of its own block. The one place that says so.

A slot of a full layer sees the context from its document's start up to (not including) its anchor, and every slot of
its block. A sliding layer of window W keeps of these the keys at positions p - W < key <= p, so it is causal inside
the block. Nothing sees another document or another block (DFlash, arXiv 2602.06036, section 3; as served by vLLM,
SGLang and the reference package).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class BlockLayout:
    """The anchors of one row, for layers that share a window. Slot k of block n stands at `anchors[n] + k`.

    `anchors` are sorted row positions, `starts` the first row position of each anchor's document (host integers);
    `window` is None for a full layer.
    """

    anchors: tuple[int, ...]
    starts: tuple[int, ...]
    block_size: int
    window: int | None

    def __post_init__(self) -> None:
        assert len(self.anchors) == len(self.starts)
        assert all(a <= b for a, b in zip(self.anchors, self.anchors[1:], strict=False)), "anchors must be sorted"
        assert all(s < a for s, a in zip(self.starts, self.anchors, strict=True)), "an anchor needs a token before it"


def context_mask(layout: BlockLayout, blocks: slice, keys: slice, device: torch.device) -> Tensor:
    """Bool [len(blocks), B, len(keys)]: may this slot see that context position? [len(blocks), 1, len(keys)] for full
    layers, where all slots of a block see the same."""
    anchors_N11 = torch.tensor(layout.anchors[blocks], device=device)[:, None, None]
    starts_N11 = torch.tensor(layout.starts[blocks], device=device)[:, None, None]
    keys_T = torch.arange(keys.start, keys.stop, device=device)
    seen_N1T = (keys_T >= starts_N11) & (keys_T < anchors_N11)
    if layout.window is None:
        return seen_N1T
    slots_NB1 = anchors_N11 + torch.arange(layout.block_size, device=device)[:, None]
    return seen_N1T & (keys_T > slots_NB1 - layout.window)


def block_mask(layout: BlockLayout, blocks: int, device: torch.device) -> Tensor:
    """Bool [blocks * B, blocks * B]: may this slot see that slot? The same for every run of neighbouring blocks."""
    slot_B = torch.arange(layout.block_size, device=device)
    seen_BB = torch.ones(layout.block_size, layout.block_size, dtype=torch.bool, device=device)
    if layout.window is not None:
        back_BB = slot_B[:, None] - slot_B[None, :]
        seen_BB = (back_BB >= 0) & (back_BB < layout.window)
    same_CC = torch.eye(blocks, dtype=torch.bool, device=device)
    return torch.kron(same_CC, seen_BB)


def slot_intervals(layout: BlockLayout) -> NDArray[np.int64]:
    """The same as two intervals per slot, [4, N * B]: it sees context positions from row 0 to row 1, and slots of the
    row from row 2 to row 3, ends exclusive."""
    size, window = layout.block_size, layout.window
    anchor_Q, start_Q = (np.repeat(np.array(ends, np.int64), size) for ends in (layout.anchors, layout.starts))
    slot_Q = np.arange(len(anchor_Q))
    place_Q = slot_Q % size  # inside the block
    first_Q = slot_Q - place_Q
    if window is None:
        return np.stack([start_Q, anchor_Q, first_Q, first_Q + size])
    low_Q = np.clip(anchor_Q + place_Q - window + 1, start_Q, anchor_Q)
    return np.stack([low_Q, anchor_Q, np.maximum(first_Q, slot_Q - window + 1), slot_Q + 1])


def behind_context(size: int, context: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """Bool [size, context + size]: what the slots of one block see that stands right behind `context` keys.

    Also for what drafters of other trainers may ask for: a causal full layer, and a sliding layer that is not causal,
    whose window reaches as far ahead as back (dflash 0.1.0, `model.py`).
    """
    slots_B1 = context + torch.arange(size, device=device)[:, None]
    keys_K = torch.arange(context + size, device=device)
    seen_BK = torch.ones(size, context + size, dtype=torch.bool, device=device)
    if causal:
        seen_BK &= keys_K <= slots_B1
    if window is not None:
        seen_BK &= (keys_K - slots_B1).abs() < window
    return seen_BK
