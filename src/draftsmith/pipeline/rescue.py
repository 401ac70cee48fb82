"""What is tried before a worker gives up: half as much at once when memory runs out, leaving out a row that is bad."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from draftsmith.drafter.anchors import split_blocks
from draftsmith.drafter.loss import LossSum
from draftsmith.errors import is_out_of_memory
from draftsmith.nouns import Blocks
from draftsmith.pipeline.gradsync import FlatGradients
from draftsmith.pipeline.transfer import release_memory

A = TypeVar("A")
B = TypeVar("B")

HALF_A_GRADIENT = (
    "a part of this row's gradient had been added already and cannot be taken back, so the step cannot be repeated in "
    "smaller pieces; lower data.row_tokens, or set drafter.checkpointing: layer"
)


class NotFiniteError(ArithmeticError):
    """A loss is NaN or infinite."""


def in_halves(
    compute: Callable[[Sequence[A]], Sequence[B]],
    items: Sequence[A],
    device: torch.device,
    say: Callable[[str], None],
) -> list[B | None]:
    """`compute(items)`; where memory does not suffice, both halves one after the other. None for an item that does not
    fit alone.

    Args:
        compute: gives as many results as it gets items.
        items: documents.
        device: whose memory ran out.
        say: receives a line for each time it was halved.
    """
    try:
        return list(compute(items))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if len(items) == 1:
            return [None]
    release_memory(device)  # behind the handler: until then the error's traceback keeps the tensors alive
    middle = len(items) // 2
    say(f"warning: out of memory on {device} with {len(items)} documents at once; done in two halves")
    return [*in_halves(compute, items[:middle], device, say), *in_halves(compute, items[middle:], device, say)]


class Portions:
    """The blocks of one row, to be learned from at once, or in halves where memory ran out.

    Blocks do not see each other, and losses and gradients are sums: halves give what the whole gives. A row whose loss
    is not finite is given up; `bad` says why.

        for blocks in portions:
            with portions.attempt(blocks):
                ...
    """

    def __init__(self, blocks: Blocks, gradients: FlatGradients, say: Callable[[str], None], bad: str = "") -> None:
        """`bad`: why there is nothing to learn from, if that is known."""
        self._left, self._gradients, self._say = deque([] if bad else [blocks]), gradients, say
        self.bad = bad
        self._learned = False  # from a part of it

    def __iter__(self) -> Iterator[Blocks]:
        while self._left:
            yield self._left.popleft()

    @contextmanager
    def attempt(self, blocks: Blocks) -> Iterator[None]:
        """Around forward, loss and backward of a portion.

        Raises:
            Exception: whatever is not lack of memory, and lack of memory for a single block or after a part of the
                gradient was added.
        """
        self._gradients.touched = False
        try:
            yield
            self._learned = True
            return
        except NotFiniteError as error:
            self.bad = str(error) + ("; a part of the row had been learned from before" if self._learned else "")
            self._left.clear()
            return
        except Exception as error:
            if not is_out_of_memory(error) or len(blocks.anchors) == 1:
                raise
            if self._gradients.touched:
                error.add_note(HALF_A_GRADIENT)
                raise
        device = blocks.tokens_NB.device
        release_memory(device)
        self._say(f"warning: out of memory on {device} with {len(blocks.anchors)} blocks at once; done in two halves")
        self._left.extendleft(reversed(split_blocks(blocks)))


def check_finite(loss: LossSum) -> None:
    """Waits for the loss, before its gradient is added to anything.

    Raises:
        NotFiniteError: it is NaN or infinite.
    """
    if not torch.isfinite(loss.loss.detach()):
        raise NotFiniteError(f"its loss is {float(loss.loss.detach()):.4g}")
