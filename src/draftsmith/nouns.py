"""The four things that travel through the pipeline: `Row` -> `Features` -> `Blocks` -> `StepRecord`.

Shape letters, here and everywhere: T tokens of a row, N anchors (= blocks) of a row, B slots of a block, Q = N*B slots
of a row, H hidden size, F = taps * H feature size, D head dimension, A query heads, G key/value heads, V vocabulary,
L learned slots.
All are frozen: they cross threads.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """Where a document lies in its row: tokens `start` to `stop` (exclusive)."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """Several documents packed side by side, with the anchors drawn for this epoch. Host memory.

    `index` counts all rows of the run from 0 and alone decides which step consumes the row.
    `anchors_N` are sorted row positions; `starts_N` is where the document of each anchor begins.
    """

    index: int
    spans: tuple[Span, ...]
    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each document
    supervised_T: Tensor  # bool: the target's (or a reference) answer
    anchors_N: Tensor  # int64
    starts_N: Tensor  # int64


@dataclass(frozen=True, eq=False, slots=True)
class Features:
    """A row with the target's hidden states at the tapped layers, concatenated: `hidden_TF`.

    `bad` says why the row cannot be learned from; `hidden_TF` is empty then.
    """

    row: Row
    hidden_TF: Tensor
    bad: str = ""

    @property
    def nbytes(self) -> int:
        return self.hidden_TF.nbytes


@dataclass(frozen=True, eq=False, slots=True)
class Blocks:
    """What the drafter is asked and what it should answer, for every anchor of a row.

    Slot 0 holds the anchor's own token, the others the mask token; slot k stands at position anchor + k and predicts
    the token there (same position, no shift). L counts the learned slots: those from slot 1 up to the first
    unsupervised token or the document's end.
    """

    tokens_NB: Tensor  # int64
    positions_NB: Tensor  # int64, inside the document
    anchors: tuple[int, ...]  # row positions, sorted
    starts: tuple[int, ...]
    learned_L: Tensor  # int64, indices into the Q = N * B slots
    labels_L: Tensor  # int64
    weights_L: Tensor  # float32


@dataclass(frozen=True, eq=False, slots=True)
class StepRecord:
    """One optimizer step, as it is written to `metrics.jsonl`. `loss` is nats per weighted label over all replicas.

    A step whose gradient is not finite, or that has no label at all, moves no weight: its `lr` is 0, and what is not
    finite is None.
    """

    step: int
    loss: float | None
    lr: float
    grad_norm: float | None
    rows: int
    skipped_rows: int  # of these, left out: see bad-rows.jsonl
    tokens: int
    anchors: int
    accuracy_per_slot: tuple[float, ...]  # slots 1..B-1, teacher forced: not an acceptance
    step_s: float
    tokens_per_s: float
    time: float  # wall clock, seconds since the epoch
    compiles_after_warmup: int  # of the whole process so far; 0 in a healthy run
