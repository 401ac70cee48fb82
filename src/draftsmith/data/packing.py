"""From documents to rows, the same rows for every topology: packing depends on the seed and on lengths alone.

A row has two budgets, tokens and anchor slots. Both counts of a document are known before anything is drawn, so a
row's anchors always fit its slots. Every epoch has the first one's rows in another order: what the target computes for
a row, down to the bits, can be kept for later epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftsmith.data.template import Document
from draftsmith.drafter.anchors import anchor_count, draw_anchors, eligible_anchors
from draftsmith.nouns import Row, Span

WINDOW = 256  # documents looked at together when filling rows


@dataclass(frozen=True, slots=True)
class PackingSettings:
    """Budgets of a row and how anchors are drawn."""

    row_tokens: int
    row_anchors: int
    anchor_density: float
    packing: bool
    seed: int


class RowSource:
    """Rows by their number in the run, counting through all epochs; the same number is always the same row.

    One caller at a time (the feed asks under its lock): orders of the last two epochs are kept.
    """

    def __init__(self, documents: Sequence[Document], settings: PackingSettings) -> None:
        assert documents, "the data room refuses an empty corpus"
        self.documents = documents
        self.settings = settings
        self._anchors = [
            anchor_count(len(eligible_anchors(d.supervised_T)), settings.anchor_density) for d in documents
        ]
        self._rows = self._pack()
        self._orders: dict[int, list[int]] = {}

    def epoch_rows(self, epoch: int) -> int:
        """Rows of an epoch: the same number in each."""
        return len(self._rows)

    def epoch_of(self, index: int) -> int:
        """The epoch a row belongs to."""
        return index // len(self._rows)

    def row(self, index: int) -> Row:
        """Row number `index` of the run, with its anchors."""
        epoch = self.epoch_of(index)
        return self._build(index, epoch, self._rows[self._order(epoch)[index % len(self._rows)]])

    def fill(self) -> float:
        """Share of the token budget that the first epoch's rows use."""
        used = sum(len(d.tokens_T) for d in self.documents)
        return used / (self.epoch_rows(0) * self.settings.row_tokens)

    def _order(self, epoch: int) -> list[int]:
        """The first epoch takes the rows as they were packed, every later one shuffled anew."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                self._orders.pop(min(self._orders))
            shuffled = np.random.default_rng([self.settings.seed, epoch]).permutation(len(self._rows))
            self._orders[epoch] = shuffled.tolist() if epoch else list(range(len(self._rows)))
        return self._orders[epoch]

    def _pack(self) -> list[list[int]]:
        """Documents of each row: shuffled, then best-fit decreasing inside a window, the window's rows shuffled."""
        random = np.random.default_rng([self.settings.seed, 0])
        order = random.permutation(len(self.documents)).tolist()
        if not self.settings.packing:
            return [[d] for d in order]
        rows: list[list[int]] = []
        for start in range(0, len(order), WINDOW):
            window = sorted(order[start : start + WINDOW], key=lambda d: -len(self.documents[d].tokens_T))
            filled = self._fill_rows(window)
            rows.extend(filled[i] for i in random.permutation(len(filled)))
        return rows

    def _fill_rows(self, window: list[int]) -> list[list[int]]:
        rows: list[list[int]] = []
        left: list[tuple[int, int]] = []  # tokens and anchors that still fit
        for document in window:
            tokens, anchors = len(self.documents[document].tokens_T), self._anchors[document]
            assert tokens <= self.settings.row_tokens, "documents are cut at the row length"
            assert anchors <= self.settings.row_anchors, "the anchor budget holds the longest document's"
            fits = [r for r, (t, a) in enumerate(left) if t >= tokens and a >= anchors]
            if fits:
                best = min(fits, key=lambda r: left[r])
                rows[best].append(document)
                left[best] = (left[best][0] - tokens, left[best][1] - anchors)
            else:
                rows.append([document])
                left.append((self.settings.row_tokens - tokens, self.settings.row_anchors - anchors))
        return rows

    def _build(self, index: int, epoch: int, members: list[int]) -> Row:
        spans, anchors, starts, start = [], [], [], 0
        for member in members:
            document = self.documents[member]
            drawn = draw_anchors(
                document.supervised_T,
                density=self.settings.anchor_density,
                seed=self.settings.seed,
                epoch=epoch,
                document=member,
            )
            spans.append(Span(member, start, start + len(document.tokens_T)))
            anchors.append(drawn + start)
            starts.append(np.full(len(drawn), start, np.int64))
            start = spans[-1].stop
        documents = [self.documents[m] for m in members]
        return Row(
            index=index,
            spans=tuple(spans),
            tokens_T=torch.from_numpy(np.concatenate([d.tokens_T for d in documents]).astype(np.int64)),
            positions_T=torch.from_numpy(np.concatenate([np.arange(len(d.tokens_T)) for d in documents])),
            supervised_T=torch.from_numpy(np.concatenate([d.supervised_T for d in documents])),
            anchors_N=torch.from_numpy(np.concatenate(anchors)),
            starts_N=torch.from_numpy(np.concatenate(starts)),
        )
