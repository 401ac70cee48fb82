"""Attention backends of the drafter: how a row's blocks attend, chosen once per drafter.

A backend plans a row once for all layers that share a window, then attends layer by layer. The dense reference that
backends are compared with lives in the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafter.attention.blockwise import ChunkPlan, blockwise_attention
from draftsmith.drafter.attention.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class Backend:
    """`plan(layout, query heads per key head, dtype, device)` once per row and window; `attend(plan, q, context keys,
    context values, slot keys, slot values)` once per layer, with the shapes of `blockwise_attention`."""

    plan: Callable[[BlockLayout, int, torch.dtype, torch.device], Any]
    attend: Callable[[Any, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


BLOCKWISE = Backend(ChunkPlan, blockwise_attention)

__all__ = ["BLOCKWISE", "Backend", "BlockLayout", "ChunkPlan", "blockwise_attention"]
