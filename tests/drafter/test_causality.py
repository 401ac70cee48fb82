"""What a slot sees in drafters of other trainers whose `is_causal` says more than their layer types."""

import pytest
import torch
from torch import Tensor

from conftest import tiny_drafter
from draftsmith.decode.states import DraftState
from draftsmith.drafter.config import FULL, SLIDING


def first_slot(size: int, *, kind: str, is_causal: bool | None) -> Tensor:
    """Logits of slot 1 of a block of `size` slots, one layer, window 3, seven tokens of context."""
    drafter = tiny_drafter(layer_types=(kind,), sliding_window=3, is_causal=is_causal, block_size=6)
    g = torch.Generator().manual_seed(1)
    weights_VH = torch.randn(64, 32, generator=g)
    state = DraftState(drafter, weights_VH, weights_VH, 7)
    with torch.inference_mode():
        state.extend(torch.randn(7, 96, generator=g))
        return state.logits(5, size)[0]


@pytest.mark.parametrize(
    ("kind", "is_causal", "changes_with"),
    [
        (FULL, None, [3, 4, 5, 6]),
        (FULL, True, []),
        (SLIDING, None, []),
        (SLIDING, False, [3, 4]),  # slots 2 and 3 are nearer than the window, slots 4 and 5 are not
    ],
)
def test_which_later_slots_a_slot_sees(kind: str, is_causal: bool | None, changes_with: list[int]) -> None:
    logits = {size: first_slot(size, kind=kind, is_causal=is_causal) for size in range(2, 7)}
    changed = [size for size in range(3, 7) if not torch.allclose(logits[size], logits[size - 1], atol=1e-6)]
    assert changed == changes_with
