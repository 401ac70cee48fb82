"""What an attention backend is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafter.attention.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class Backend:
    """`plan(layout, query heads per key head, dtype, device)` once per row and window; `attend(plan, q, context keys,
    context values, slot keys, slot values)` once per layer, with the shapes of `blockwise_attention`.

    If it `compiles`, the signature depends on device, dtype and grad mode alone, so one call per device warms it up.
    """

    plan: Callable[[BlockLayout, int, torch.dtype, torch.device], Any]
    attend: Callable[[Any, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    compiles: bool = False
