"""Anchors are drawn per document; blocks ask and answer exactly what the decoder will."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.drafter.anchors import (
    anchor_count,
    draw_anchors,
    eligible_anchors,
    make_blocks,
    slot_weights,
    split_blocks,
)
from draftsmith.nouns import Blocks, Row, Span

MASK = 99


def mask_of(text: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.array([c == "#" for c in text], np.bool_)


@pytest.mark.parametrize(
    ("supervised", "eligible"),
    [
        ("..####.", [2, 3, 4]),
        ("####", [1, 2]),  # position 0 has no token before it, the last no token after it
        (".#.#.#", []),
        ("##", []),
        (".##", [1]),
        ("##.##", [3]),
        ("#", []),
        ("", []),
    ],
)
def test_an_anchor_has_context_and_something_to_predict(supervised: str, eligible: list[int]) -> None:
    mask = mask_of(supervised)
    found = eligible_anchors(mask)
    assert (found.tolist(), found.dtype) == (eligible, np.int64)
    assert mask.tolist() == mask_of(supervised).tolist(), "the document's mask is left alone"


def test_count_is_the_floored_share_but_at_least_one() -> None:
    assert [anchor_count(n, 0.25) for n in (1, 3, 4, 7, 8, 100)] == [1, 1, 1, 1, 2, 25]
    assert anchor_count(10, 1.0) == 10


def draw(text: str = "." + "#" * 40, **changes: Any) -> list[int]:
    how: dict[str, Any] = {"density": 0.25, "seed": 0, "epoch": 0, "document": 0}
    return draw_anchors(mask_of(text), **(how | changes)).tolist()


def test_anchors_are_sorted_unique_eligible_and_repeatable() -> None:
    eligible = set(eligible_anchors(mask_of("." + "#" * 40)).tolist())
    for document in range(50):
        anchors = draw(document=document)
        assert len(anchors) == anchor_count(39, 0.25) == 9
        assert anchors == sorted(set(anchors))
        assert set(anchors) <= eligible
        assert anchors == draw(document=document)
    assert draw(density=1.0) == sorted(eligible)


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"document": 1}])
def test_anchors_depend_on_seed_epoch_and_document(change: dict[str, int]) -> None:
    assert draw(**change) != draw()


def test_every_eligible_position_is_drawn_in_some_epoch() -> None:
    seen = {a for epoch in range(60) for a in draw(epoch=epoch)}
    assert seen == set(eligible_anchors(mask_of("." + "#" * 40)).tolist())


def test_no_eligible_position_is_refused() -> None:
    with pytest.raises(ValueError, match="document 7 has no two neighbouring supervised tokens"):
        draw(".#.#", document=7)


def test_weights_fall_from_the_first_drafted_slot() -> None:
    weights = slot_weights(5, 2.0).tolist()
    assert weights == pytest.approx([0, 1, math.exp(-0.5), math.exp(-1), math.exp(-1.5)])


def row(documents: list[str], anchors: list[int]) -> Row:
    """A packed row whose token at position t is 10 + t."""
    spans, start = [], 0
    for number, text in enumerate(documents):
        spans.append(Span(number, start, start + len(text)))
        start += len(text)
    starts = [next(s.start for s in spans if s.start <= a < s.stop) for a in anchors]
    return Row(
        index=0,
        spans=tuple(spans),
        tokens_T=torch.arange(10, 10 + start),
        positions_T=torch.cat([torch.arange(len(text)) for text in documents]),
        supervised_T=torch.from_numpy(mask_of("".join(documents))),
        anchors_N=torch.tensor(anchors),
        starts_N=torch.tensor(starts),
    )


def learned(blocks: Blocks) -> dict[int, dict[int, int]]:
    """block -> slot -> label."""
    size = blocks.tokens_NB.shape[1]
    found: dict[int, dict[int, int]] = {}
    for place, label in zip(blocks.learned_L.tolist(), blocks.labels_L.tolist(), strict=True):
        found.setdefault(place // size, {})[place % size] = label
    return found


def blocks(documents: list[str], anchors: list[int], size: int = 4) -> Blocks:
    return make_blocks(row(documents, anchors), block_size=size, mask_token=MASK, gamma=2.0)


def test_slot_k_is_asked_for_the_token_at_anchor_plus_k() -> None:
    """Same position, no shift: the label of slot 1 is the token right after the anchor."""
    made = blocks([".########"], [2, 4])
    assert made.tokens_NB.tolist() == [[12, MASK, MASK, MASK], [14, MASK, MASK, MASK]]
    assert made.positions_NB.tolist() == [[2, 3, 4, 5], [4, 5, 6, 7]]
    assert learned(made) == {0: {1: 13, 2: 14, 3: 15}, 1: {1: 15, 2: 16, 3: 17}}
    assert made.weights_L.tolist() == pytest.approx(slot_weights(4, 2.0)[1:].tolist() * 2)
    assert (made.anchors, made.starts) == ((2, 4), (0, 0))


@pytest.mark.parametrize(
    ("documents", "anchor", "slots"),
    [
        ([".##.####"], 1, {1: 12}),  # the first unsupervised token ends it, whatever comes after
        ([".###", ".####"], 2, {1: 13}),  # the next document begins
        ([".###", "#####"], 2, {1: 13}),  # even if that one is supervised from its first token
        ([".####"], 3, {1: 14}),  # the row ends
        ([".####"], 2, {1: 13, 2: 14}),
        ([".####", ".####"], 7, {1: 18, 2: 19}),
        ([".####", "####"], 5, {1: 16, 2: 17, 3: 18}),  # a document's first token belongs to it, not to the one before
    ],
)
def test_where_learning_ends(documents: list[str], anchor: int, slots: dict[int, int]) -> None:
    assert learned(blocks(documents, [anchor])) == {0: slots}


def test_positions_restart_with_the_document() -> None:
    made = blocks([".####", ".####"], [2, 7])
    assert made.positions_NB.tolist() == [[2, 3, 4, 5], [2, 3, 4, 5]]
    assert made.starts == (0, 5)


def test_blocks_packed_are_blocks_alone() -> None:
    texts, anchors = [".#####", "..####.##", ".###"], [[1, 3], [2, 4, 7], [1]]
    starts = [0, 6, 15]
    packed = blocks(texts, [s + a for s, list_ in zip(starts, anchors, strict=True) for a in list_])
    alone = [learned(blocks([text], list_)) for text, list_ in zip(texts, anchors, strict=True)]
    expected = [
        {slot: label + start for slot, label in made[n].items()}
        for made, start in zip(alone, starts, strict=True)
        for n in sorted(made)
    ]
    assert [learned(packed)[n] for n in range(6)] == expected


@pytest.mark.parametrize("anchors", [[1, 3, 8, 10, 16], [1, 3, 8, 10], [3, 16], [5, 8]], ids=str)
def test_halves_are_the_blocks_of_half_the_anchors(anchors: list[int]) -> None:
    """Also where a half has nothing to learn: the block at 5 ends with its document."""
    documents, middle = [".#####", "..####.##", ".###"], len(anchors) // 2
    halves = split_blocks(blocks(documents, anchors))
    for half, own in zip(halves, (anchors[:middle], anchors[middle:]), strict=True):
        for field in dataclasses.fields(Blocks):
            got, wanted = (getattr(made, field.name) for made in (half, blocks(documents, own)))
            assert torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted, field.name
