"""Halves of a row, and rows that are given up, without a run around them."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from conftest import random_documents, row_source
from draftsmith.drafter.anchors import make_blocks
from draftsmith.nouns import Blocks
from draftsmith.pipeline.gradsync import FlatGradients
from draftsmith.pipeline.rescue import NotFiniteError, Portions, in_halves


def portions(lines: list[str], bad: str = "") -> tuple[Portions, FlatGradients, int]:
    row = row_source(random_documents(7, [40])).row(0)
    blocks = make_blocks(row, block_size=4, mask_token=63, gamma=4.0)
    gradients = FlatGradients([nn.Parameter(torch.zeros(2))])
    return Portions(blocks, gradients, lines.append, bad), gradients, len(blocks.anchors)


def attempts(wanted: Portions, faults: Sequence[BaseException | None]) -> list[int]:
    """Blocks of each portion; the n-th attempt raises the n-th fault."""
    sizes = []
    for blocks, fault in zip(wanted, faults, strict=False):
        sizes.append(len(blocks.anchors))
        with wanted.attempt(blocks):
            if fault is not None:
                raise fault
    return sizes


def test_halves_come_in_order_and_make_the_whole() -> None:
    lines: list[str] = []
    wanted, _, count = portions(lines)
    sizes = attempts(wanted, [MemoryError(), None, MemoryError(), None, None, None])
    half, rest = count // 2, count - count // 2
    assert sizes == [count, half, rest, rest // 2, rest - rest // 2]
    assert len(lines) == 2
    assert not wanted.bad


@pytest.mark.parametrize("learned", [0, 1])
def test_a_row_that_is_not_finite_is_given_up_with_all_its_halves(learned: int) -> None:
    wanted, _, _ = portions([])
    faults = [MemoryError(), *[None] * learned, NotFiniteError("its loss is nan")]
    assert len(attempts(wanted, [*faults, None, None])) == len(faults), "nothing of it is tried any more"
    assert wanted.bad.startswith("its loss is nan")
    assert ("had been learned from before" in wanted.bad) == bool(learned)


def test_a_row_that_is_bad_already_has_no_portions() -> None:
    wanted, _, _ = portions([], "its features are not finite")
    assert not list(wanted)
    assert wanted.bad == "its features are not finite"


def test_what_halves_cannot_mend_is_raised() -> None:
    wanted, _, _ = portions([])
    with pytest.raises(OSError, match="the cause"):
        attempts(wanted, [OSError("the cause")])
    wanted, _, count = portions([])
    with pytest.raises(MemoryError):
        attempts(wanted, [MemoryError()] * count)
    wanted, gradients, _ = portions([])
    blocks: Blocks = next(iter(wanted))

    def backward() -> None:
        with wanted.attempt(blocks):
            gradients.touched = True
            raise MemoryError

    with pytest.raises(MemoryError) as caught:
        backward()
    assert "gradient had been added already" in caught.value.__notes__[0]


def test_results_of_halves_stay_in_order_and_what_never_fits_is_none() -> None:
    def compute(items: Sequence[int]) -> list[int]:
        if len(items) > 2 or 5 in items:
            raise MemoryError
        return [10 * item for item in items]

    lines: list[str] = []
    found = in_halves(compute, list(range(8)), torch.device("cpu"), lines.append)
    assert found == [0, 10, 20, 30, 40, None, 60, 70]
    assert len(lines) == 4
    with pytest.raises(ZeroDivisionError):
        in_halves(lambda items: [1 // 0], [1, 2], torch.device("cpu"), lines.append)
