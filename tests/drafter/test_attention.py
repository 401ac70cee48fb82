"""Blockwise attention is the dense reference, forward and backward, and a wrong mask is noticed."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dense import dense_attention, dense_mask
from draftsmith.drafter.attention import BlockLayout, ChunkPlan, blockwise, blockwise_attention, kernels, layout

CASES = range(24)


def case(seed: int) -> dict[str, Any]:
    """Random documents, anchors, window (also smaller than the block), group count and sizes."""
    r = random.Random(seed)
    size, kv_heads, groups, dim = r.choice([2, 4, 7, 16]), r.choice([1, 2, 3]), r.choice([1, 2, 4]), r.choice([8, 32])
    anchors, starts, start = [], [], 0
    for _ in range(r.randint(1, 4)):
        length = r.randint(2, 60)
        picked = sorted(r.sample(range(1, length), min(length - 1, r.randint(1, 12))))
        anchors += [start + a for a in picked]
        starts += [start] * len(picked)
        start += length
    window = r.choice([None, None, 1, 2, 3, size, 9, 40])
    return {"anchors": anchors, "starts": starts, "size": size, "window": window, "context": start,
            "kv_heads": kv_heads, "heads": kv_heads * groups, "dim": dim}  # fmt: skip


def tensors(c: dict[str, Any], seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    slots = len(c["anchors"]) * c["size"]

    def make(heads: int, length: int) -> Tensor:
        return torch.randn(heads, length, c["dim"], generator=g).requires_grad_()

    kv = c["kv_heads"]
    return [make(c["heads"], slots), make(kv, c["context"]), make(kv, c["context"]), make(kv, slots), make(kv, slots)]


def difference(c: dict[str, Any], seed: int) -> float:
    """Largest difference of output and all gradients, relative to the largest value of each."""
    inputs = tensors(c, seed)
    where = BlockLayout(tuple(c["anchors"]), tuple(c["starts"]), c["size"], c["window"])
    plan = ChunkPlan(where, c["heads"] // c["kv_heads"], torch.float32, torch.device("cpu"))
    mask = dense_mask(c["anchors"], c["starts"], c["size"], c["window"], c["context"])
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(seed + 1))
    expected = dense_attention(mask, *inputs)
    ours = blockwise_attention(plan, *inputs)
    wanted = [expected.detach(), *torch.autograd.grad(expected, inputs, upstream)]
    got = [ours.detach(), *torch.autograd.grad(ours, inputs, upstream)]
    largest = max(float(b.abs().max()) for b in wanted)
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        own = float(b.abs().max())
        # A slot that sees only itself has no gradient at all in its query: then there is no own scale.
        worst = max(worst, float((a - b).abs().max()) / (own if own > 1e-6 * largest else largest))
    return worst


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused kernel", "public SDPA"])
def test_equals_the_dense_reference(seed: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        assert kernels.fused_cpu_available(), "this torch lacks the tested kernel: add its schema or drop the version"
    monkeypatch.setattr(kernels, "_FUSED_CPU", fused)
    assert difference(case(seed), seed) <= 1e-5


def test_masks_built_when_used_are_the_kept_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "KEPT_MASK_BYTES", 0)
    assert difference(case(5), 5) <= 1e-5


def test_masks_are_kept_as_long_as_all_of_them_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "CHUNK_SLOTS", 8)
    layout = BlockLayout(tuple(range(1, 40, 2)), (0,) * 20, 4, None)

    def masks_twice(limit_bytes: int) -> list[tuple[Tensor, Tensor]]:
        monkeypatch.setattr(blockwise, "KEPT_MASK_BYTES", limit_bytes)
        plan = ChunkPlan(layout, 2, torch.float32, torch.device("cpu"))
        return [(mask, again) for (_, mask), (_, again) in zip(plan, plan, strict=True)]

    all_bytes = sum(mask.nbytes for mask, _ in masks_twice(0))
    assert all(mask is again for mask, again in masks_twice(all_bytes))
    assert not any(mask is again for mask, again in masks_twice(all_bytes - 1))


def test_kept_masks_have_a_ceiling() -> None:
    """The first mask of a long row is built anew each time, that of a short row is kept."""
    for blocks, kept in ((64, True), (8192, False)):
        anchors = tuple(range(1, blocks + 1))
        plan = ChunkPlan(BlockLayout(anchors, (0,) * blocks, 8, 4096), 2, torch.float32, torch.device("cpu"))
        (_, mask), (_, again) = next(iter(plan)), next(iter(plan))
        assert (mask is again) is kept


def test_a_window_bounds_what_a_chunk_reads() -> None:
    """Not only what it sees: from the first anchor's window to the last anchor."""
    layout = BlockLayout(tuple(range(100, 164)), (0,) * 64, 8, 32)
    plan = ChunkPlan(layout, 2, torch.float32, torch.device("cpu"))
    assert [chunk.keys for chunk in plan.chunks] == [slice(a - 31, a + 15) for a in (100, 116, 132, 148)]


def test_it_runs_where_the_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data here, since no second device is at hand."""
    meta, c, asked = torch.device("meta"), case(5), []
    for name in ("block_mask", "context_mask"):
        make = getattr(blockwise, name)
        monkeypatch.setattr(blockwise, name, lambda *a, make=make: (asked.append(a[-1]), make(*a))[1])
    inputs = [tensor.detach().to(meta).requires_grad_() for tensor in tensors(c, 5)]
    where = BlockLayout(tuple(c["anchors"]), tuple(c["starts"]), c["size"], c["window"])
    plan = ChunkPlan(where, c["heads"] // c["kv_heads"], torch.float32, meta)
    assert all(mask.device == meta for _, mask in plan)
    assert set(asked) == {meta}
    out = blockwise_attention(plan, *inputs)
    gradients = torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert {(x.device, x.shape) for x in (out, *gradients)} == {(meta, x.shape) for x in inputs}


def test_chunk_borders_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(3) | {"size": 4}
    for slots in (1, 4, 12, 10_000):
        monkeypatch.setattr(blockwise, "CHUNK_SLOTS", slots)
        assert difference(c, 3) <= 1e-5


def test_what_a_run_of_chunks_shares_is_merged_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs of two chunks, so that most cases have runs inside one document, and others across documents."""
    monkeypatch.setattr(blockwise, "CHUNK_SLOTS", 8)
    monkeypatch.setattr(blockwise, "RUN_ROWS", 32)
    sharing = 0
    for seed in CASES:
        c = case(seed)
        where = BlockLayout(tuple(c["anchors"]), tuple(c["starts"]), c["size"], c["window"])
        plan = ChunkPlan(where, c["heads"] // c["kv_heads"], torch.float32, torch.device("cpu"))
        sharing += len(plan.shared) > 1 and len(plan.chunks) > len(plan.shared)
        assert difference(c, seed) <= 1e-5
    assert sharing >= 3


def test_a_run_shares_only_what_its_first_block_sees() -> None:
    """Blocks of one document share up to the run's first anchor; a window, or two documents in a run, share nothing."""

    def shared(anchors: tuple[int, ...], starts: tuple[int, ...], window: int | None) -> list[slice]:
        layout = BlockLayout(anchors, starts, 4, window)
        return [keys for _, keys in ChunkPlan(layout, 2, torch.float32, torch.device("cpu")).shared]

    assert shared((13, 15, 20), (10, 10, 10), None) == [slice(10, 13)]
    assert shared((13, 15, 20), (10, 10, 10), 50) == []
    assert shared((3, 15, 20), (0, 10, 10), None) == []


@pytest.mark.parametrize(
    "mutant",
    [
        lambda layout, blocks, keys, device: _sees_own_anchor(layout, blocks, keys, device),
        lambda layout, blocks, keys, device: _ignores_documents(layout, blocks, keys, device),
    ],
    ids=["sees its own anchor", "crosses documents"],
)
def test_a_wrong_context_mask_is_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "context_mask", mutant)
    assert max(difference(case(seed), seed) for seed in CASES) > 1e-3


def test_a_wrong_block_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        blockwise, "block_mask", lambda at, n, d: torch.ones(n * at.block_size, n * at.block_size, dtype=torch.bool)
    )
    assert max(difference(case(seed), seed) for seed in CASES) > 1e-3


def _sees_own_anchor(where: BlockLayout, blocks: slice, keys: slice, device: torch.device) -> Tensor:
    """Off by one within what the chunk holds: `<=` instead of `<` for all but the chunk's last anchor."""
    seen = layout.context_mask(where, blocks, keys, device)
    for number, anchor in enumerate(where.anchors[blocks]):
        if keys.start <= anchor < keys.stop:
            seen[number, :, anchor - keys.start] = True
    return seen


def _ignores_documents(where: BlockLayout, blocks: slice, keys: slice, device: torch.device) -> Tensor:
    free = BlockLayout(where.anchors, tuple(0 for _ in where.starts), where.block_size, where.window)
    return layout.context_mask(free, blocks, keys, device)


def test_nothing_as_large_as_the_whole_score_grid_is_allocated() -> None:
    """The masks of all chunks together would be the grid; no single tensor may come near it."""
    anchors = tuple(range(1, 2049, 4))
    where = BlockLayout(anchors, tuple(0 for _ in anchors), 8, None)
    largest = max(mask.numel() for _, mask in ChunkPlan(where, 2, torch.float32, torch.device("cpu")))
    assert largest <= 2 * blockwise.CHUNK_SLOTS * (2048 + blockwise.CHUNK_SLOTS)
    assert largest * 20 < len(anchors) * 8 * (2048 + len(anchors) * 8)
