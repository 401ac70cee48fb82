"""Rows keep two budgets, hold every document once per epoch, and depend on nothing but seed, epoch and documents."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from conftest import random_documents, row_source
from draftsmith.data import packing
from draftsmith.data.packing import RowSource
from draftsmith.data.template import Document
from draftsmith.nouns import Row

LENGTHS = random.Random(0).choices(range(2, 65), k=300)
BUDGETS = [{}, {"row_tokens": 128, "row_anchors": 64}, {"row_tokens": 512, "row_anchors": 33}, {"packing": False}]


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [d for d in random_documents(3, LENGTHS) if (d.supervised_T[1:-1] & d.supervised_T[2:]).any()]


def rows(source: RowSource, epoch: int) -> list[Row]:
    first = sum(source.epoch_rows(e) for e in range(epoch))
    return [source.row(i) for i in range(first, first + source.epoch_rows(epoch))]


def anchors_by_document(row: Row) -> dict[int, list[int]]:
    """Positions inside each document."""
    anchors = row.anchors_N.tolist()
    return {s.document: [a - s.start for a in anchors if s.start <= a < s.stop] for s in row.spans}


def same(a: Row, b: Row) -> bool:
    fields = ("tokens_T", "positions_T", "supervised_T", "anchors_N", "starts_N")
    equal = all(torch.equal(getattr(a, f), getattr(b, f)) for f in fields)
    return equal and (a.index, a.spans) == (b.index, b.spans)


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_document_stands_once_per_epoch_inside_both_budgets(
    budget: dict[str, Any], documents: list[Document]
) -> None:
    source = row_source(documents, **budget)
    for epoch in range(3):
        made = rows(source, epoch)
        assert sorted(s.document for row in made for s in row.spans) == list(range(len(documents)))
        for row in made:
            assert len(row.tokens_T) <= source.settings.row_tokens
            assert len(row.anchors_N) <= source.settings.row_anchors
    if source.settings.packing:
        assert max(len(row.spans) for row in made) > 1
        assert source.fill() > 0.9 or source.settings.row_anchors == 33
    else:
        assert all(len(row.spans) == 1 for row in made)


def test_a_row_is_its_documents_side_by_side(documents: list[Document]) -> None:
    for row in rows(row_source(documents, row_tokens=128), 0):
        assert row.spans[0].start == 0
        assert row.spans[-1].stop == len(row.tokens_T)
        for span, following in zip(row.spans, row.spans[1:], strict=False):
            assert span.stop == following.start
        for document, start, stop in row.spans:
            assert row.tokens_T[start:stop].tolist() == documents[document].tokens_T.tolist()
            assert row.supervised_T[start:stop].tolist() == documents[document].supervised_T.tolist()
            assert row.positions_T[start:stop].tolist() == list(range(stop - start))
        anchors = row.anchors_N.tolist()
        assert anchors == sorted(set(anchors))
        starts = [next(s.start for s in row.spans if s.start <= a < s.stop) for a in anchors]
        assert row.starts_N.tolist() == starts


def test_anchors_are_the_same_packed_or_not_and_in_any_row_length(documents: list[Document]) -> None:
    def epoch_anchors(**budget: Any) -> dict[int, list[int]]:
        source = row_source(documents, **budget)
        return {d: a for row in rows(source, 1) for d, a in anchors_by_document(row).items()}

    expected = epoch_anchors(packing=False)
    assert all(expected.values())
    assert epoch_anchors() == expected
    assert epoch_anchors(row_tokens=512, row_anchors=256) == expected
    assert epoch_anchors(seed=1) != expected


def test_epochs_and_seeds_differ_in_rows_and_anchors(documents: list[Document]) -> None:
    source = row_source(documents)
    first, second, third = ([row.spans for row in rows(source, e)] for e in range(3))
    assert first != second != third != first
    assert first != [row.spans for row in rows(row_source(documents, seed=1), 0)]
    anchors = [{d: a for row in rows(source, e) for d, a in anchors_by_document(row).items()} for e in (0, 1)]
    assert anchors[0] != anchors[1]


def test_any_order_of_asking_gives_the_same_rows(documents: list[Document]) -> None:
    """A resumed run starts in the middle; a row's number alone says what it holds."""
    source = row_source(documents)
    count = sum(source.epoch_rows(epoch) for epoch in range(5))
    in_order = [source.row(i) for i in range(count)]
    assert [row.index for row in in_order] == list(range(count))
    for ask in (random.Random(1).sample(range(count), count), range(count - 1, -1, -1)):
        fresh = row_source(documents)
        assert all(same(fresh.row(i), in_order[i]) for i in ask)
    assert same(row_source(documents).row(count - 1), in_order[-1])


def test_epoch_of_a_row_number(documents: list[Document]) -> None:
    source = row_source(documents)
    bounds = np.cumsum([0] + [source.epoch_rows(e) for e in range(3)])
    for epoch in range(3):
        assert source.epoch_of(int(bounds[epoch])) == epoch
        assert source.epoch_of(int(bounds[epoch + 1]) - 1) == epoch


def test_every_epoch_has_the_first_ones_rows(documents: list[Document]) -> None:
    """So that features of a row can be kept: the target meets the same documents together in every epoch."""
    source = row_source(documents)
    made = [sorted(row.spans for row in rows(source, epoch)) for epoch in range(3)]
    assert made[0] == made[1] == made[2]


def test_only_two_orders_are_kept(documents: list[Document]) -> None:
    source = row_source(documents)
    for epoch in range(6):
        rows(source, epoch)
    assert set(source._orders) == {4, 5}


def test_long_documents_are_spread_over_the_epoch(documents: list[Document]) -> None:
    """Filling by length must not leave a window of rows sorted by length."""
    assert len(documents) > packing.WINDOW
    in_one_window = row_source(documents[: packing.WINDOW])
    longest = [max(span.stop - span.start for span in row.spans) for row in rows(in_one_window, 0)]
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.3


def test_a_document_beyond_a_budget_is_never_packed_quietly() -> None:
    (long,) = random_documents(0, [65])
    with pytest.raises(AssertionError, match="row length"):
        row_source([long], row_anchors=64).row(0)
    with pytest.raises(AssertionError, match="anchor budget"):
        row_source([long], row_tokens=128, row_anchors=1).row(0)


@pytest.mark.parametrize("row_tokens", [1024, 2048, 4096])
def test_rows_of_ordinary_chats_are_full(row_tokens: int) -> None:
    """Lengths as chats have them (log-normal, a third of each learned), at the default density of anchors."""
    lengths = np.random.default_rng(0).lognormal(5.8, 0.9, 3000).astype(int).clip(8, row_tokens)
    documents = [Document(np.zeros(n, np.int32), np.arange(n) >= n * 2 // 3) for n in lengths.tolist()]
    anchors = max(1, row_tokens // 4)
    source = row_source(documents, row_tokens=row_tokens, row_anchors=anchors, anchor_density=0.25)
    assert source.fill() >= 0.95
