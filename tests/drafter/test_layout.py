"""Who sees whom, key by key: every mask against rules written from the definition alone."""

import itertools

import numpy as np
import pytest
import torch

from dense import dense_mask
from draftsmith.drafter.attention.layout import BlockLayout, behind_context, block_mask, context_mask, slot_intervals

CPU, META = torch.device("cpu"), torch.device("meta")
ANCHORS, STARTS, CONTEXT, SIZE = (1, 4, 9, 12, 17), (0, 0, 0, 11, 11), 20, 4
WINDOWS = [None, 1, 2, 3, 4, 6, 40]


def layout(window: int | None) -> BlockLayout:
    return BlockLayout(ANCHORS, STARTS, SIZE, window)


def rules(window: int | None) -> torch.Tensor:
    """Bool [N, B, context + N * B]."""
    return dense_mask(list(ANCHORS), list(STARTS), SIZE, window, CONTEXT).view(len(ANCHORS), SIZE, -1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("blocks", [slice(0, 5), slice(1, 3), slice(2, 5)], ids=str)
@pytest.mark.parametrize("keys", [slice(0, CONTEXT), slice(3, 13)], ids=str)
def test_context_of_some_blocks_and_keys(window: int | None, blocks: slice, keys: slice) -> None:
    seen = context_mask(layout(window), blocks, keys, CPU)
    assert seen.shape[1] == (1 if window is None else SIZE), "slots of a full layer see the same"
    expected = rules(window)[blocks, :, keys]
    assert torch.equal(seen.expand(expected.shape), expected)


@pytest.mark.parametrize("window", WINDOWS)
def test_slots_see_slots_of_their_own_block(window: int | None) -> None:
    seen = block_mask(layout(window), 3, CPU)
    assert seen.dtype == torch.bool
    assert torch.equal(seen, rules(window)[:3, :, CONTEXT : CONTEXT + 3 * SIZE].reshape(3 * SIZE, -1))


@pytest.mark.parametrize("window", WINDOWS)
def test_intervals_say_the_same(window: int | None) -> None:
    intervals = slot_intervals(layout(window))
    assert intervals.dtype == np.int64
    low_Q1, high_Q1, first_Q1, stop_Q1 = (torch.from_numpy(ends)[:, None] for ends in intervals)
    context_T, slots_Q = torch.arange(CONTEXT), torch.arange(len(ANCHORS) * SIZE)
    seen = torch.cat([(context_T >= low_Q1) & (context_T < high_Q1), (slots_Q >= first_Q1) & (slots_Q < stop_Q1)], 1)
    assert torch.equal(seen, rules(window).flatten(0, 1))
    assert (intervals[0] >= np.repeat(STARTS, SIZE)).all(), "an empty interval lies inside its document, too"
    assert (intervals[0] <= intervals[1]).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize(("size", "context"), [(1, 1), (4, 2), (5, 12)])
def test_every_key_behind_a_context(size: int, context: int, window: int | None, causal: bool) -> None:
    mask = behind_context(size, context, window, causal, CPU)
    assert (mask.shape, mask.dtype) == ((size, context + size), torch.bool)
    for slot, key in itertools.product(range(size), range(context + size)):
        distance = context + slot - key
        near = window is None or abs(distance) < window
        assert bool(mask[slot, key]) is (near and (distance >= 0 or not causal))


@pytest.mark.parametrize("window", [None, 3])
def test_masks_lie_on_the_device_that_was_asked_for(window: int | None) -> None:
    made = [
        context_mask(layout(window), slice(0, 2), slice(0, 5), META),
        block_mask(layout(window), 2, META),
        behind_context(4, 5, window, True, META),
    ]
    assert {mask.device for mask in made} == {META}


@pytest.mark.parametrize(
    ("anchors", "starts"),
    [((3, 2), (0, 0)), ((3,), (0, 0)), ((3, 5), (0,)), ((3,), (3,)), ((3, 5), (0, 6))],
    ids=["unsorted", "one start too many", "one too few", "nothing before it", "before its document"],
)
def test_a_layout_that_cannot_be_is_refused(anchors: tuple[int, ...], starts: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        BlockLayout(anchors, starts, SIZE, None)


def test_anchors_may_be_neighbours_or_the_same() -> None:
    """Two draws of one position are two blocks."""
    assert BlockLayout((1, 1, 2), (0, 0, 0), SIZE, None).anchors == (1, 1, 2)
