"""Flex attention is the dense reference; its tiles say exactly what its mask says; new rows compile nothing.

PyTorch has no backward of flex attention on the CPU. Gradients are checked through the compiler's front end alone
(`aot_eager`), which needs no C++ compiler and runs the same graph in plain operators.
"""

import random
import shutil

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as library

from conftest import random_documents, row_source, tiny_drafter
from dense import dense_attention, dense_mask
from draftsmith.compile import guard
from draftsmith.compile.warmup import Signature, warm_up
from draftsmith.drafter.anchors import make_blocks
from draftsmith.drafter.attention import BLOCKWISE, Backend, BlockLayout, flex
from draftsmith.drafter.attention.flex import build_mask, flex_backend, whole_tiles
from draftsmith.drafter.config import FULL, SLIDING
from draftsmith.drafter.loss import block_loss
from draftsmith.drafter.model import Drafter, RotaryTable

CPU = torch.device("cpu")
ROW_TOKENS, ROW_ANCHORS, SIZE, HEADS, KV_HEADS, DIM = 300, 40, 7, 4, 2, 16
TILE_TOKENS = 128


def row(seed: int, size: int = SIZE) -> tuple[BlockLayout, int]:
    """A row of one to four documents and its length; windows also smaller than a block."""
    r = random.Random(seed)
    anchors, starts, start = [], [], 0
    for _ in range(r.randint(1, 4)):
        length = r.randint(2, ROW_TOKENS // 4)
        picked = sorted(r.sample(range(1, length), min(length - 1, r.randint(1, ROW_ANCHORS // 4))))
        anchors += [start + a for a in picked]
        starts += [start] * len(picked)
        start += length
    return BlockLayout(tuple(anchors), tuple(starts), size, r.choice([None, None, 1, 3, size, 40, 150])), start


def tensors(slots: int, tokens: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, slots), *[(KV_HEADS, tokens)] * 2, *[(KV_HEADS, slots)] * 2]
    return [torch.randn(heads, length, DIM, generator=g) for heads, length in shapes]


def padded_reference(layout: BlockLayout, context: int, tokens: int, slots: int) -> Tensor:
    """The dense reference, moved to where flex attention keeps things; padded slots see themselves."""
    dense = dense_mask(list(layout.anchors), list(layout.starts), layout.block_size, layout.window, context)
    count = len(dense)
    mask = torch.zeros(slots, tokens + slots, dtype=torch.bool)
    mask[:count, :context], mask[:count, tokens : tokens + count] = dense[:, :context], dense[:, context:]
    mask[range(count, slots), range(tokens + count, tokens + slots)] = True
    return mask


def listed(count: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Bool [rows, columns] of an ordered list of columns per row."""
    table = torch.zeros(count.shape[-1], columns, dtype=torch.bool)
    for at, (number, chosen) in enumerate(zip(count[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        table[at, chosen[:number]] = True
    return table


@pytest.mark.parametrize(("size", "rows"), [(2, 12), (7, 12), (16, 6), (300, 2)])
def test_mask_and_tiles_are_the_dense_reference(size: int, rows: int) -> None:
    """Both directions: the kernel's forward goes by slots, part of its backward by keys."""
    for seed in range(rows):
        layout, context = row(seed, size)
        if size == 300:  # a block of several tiles: some are seen whole
            layout = BlockLayout(layout.anchors[:1], layout.starts[:1], size, layout.window)
        r = random.Random(seed)
        tokens, slots = whole_tiles(context + r.randint(0, 200)), whole_tiles(len(layout.anchors) * size + 60)
        expected = padded_reference(layout, context, tokens, slots)
        mask = build_mask(layout, tokens, slots, CPU)
        zero = torch.tensor(0)
        everywhere = mask.mask_mod(zero, zero, torch.arange(slots)[:, None], torch.arange(tokens + slots)[None])
        assert torch.equal(everywhere, expected)
        tiles = expected.view(slots // 128, 128, -1, 128).transpose(1, 2).flatten(2)
        whole, some = tiles.all(-1), tiles.any(-1)
        by_slots, by_keys = whole.shape
        assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices, by_keys), whole)
        assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices, by_keys), some & ~whole)
        assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices, by_slots), whole.T)
        assert torch.equal(listed(mask.q_num_blocks, mask.q_indices, by_slots), (some & ~whole).T)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_rows_are_padded_attended_and_cut_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend around the library's attention, here without the compiler: it equals the dense reference."""
    monkeypatch.setattr(guard, "compile", lambda function: function)
    backend = flex_backend(ROW_TOKENS, ROW_ANCHORS)
    assert backend.compiles
    for seed in range(3):
        layout, tokens = row(seed)
        plan = backend.plan(layout, 2, torch.float32, CPU)
        assert (plan.tokens, plan.slots) == (384, 384), "the shape of every row"
        inputs = tensors(len(layout.anchors) * SIZE, tokens, seed)
        dense = dense_mask(list(layout.anchors), list(layout.starts), SIZE, layout.window, tokens)
        expected = dense_attention(dense, *inputs)
        q, kc, vc, kb, vb = inputs
        for lower in (torch.float32, torch.bfloat16):  # queries and keys come in the values' dtype, or in fp32
            got = backend.attend(plan, q, kc, vc.to(lower), kb, vb.to(lower))
            assert (got.shape, got.dtype) == (expected.shape, lower)
            tolerance = 1e-5 if lower == torch.float32 else 3e-2
            assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_tables_list_tiles_in_order() -> None:
    """The kernel walks through keys as listed; many columns, so that a sort that is not stable shows."""
    table = np.random.default_rng(0).random((5, 200)) < 0.3
    count, columns = flex._ordered(table)
    assert (count.dtype, columns.dtype, columns.shape) == (torch.int32, torch.int32, (1, 1, 5, 200))
    for line, number, chosen in zip(table, count[0, 0].tolist(), columns[0, 0].tolist(), strict=True):
        assert chosen == [*np.flatnonzero(line), *np.flatnonzero(~line)]
        assert number == line.sum()


def test_the_kernel_is_told_the_size_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "TILE", 64)
    assert build_mask(BlockLayout((1,), (0,), SIZE, None), 64, 64, CPU).BLOCK_SIZE == (64, 64)


def test_a_plan_lies_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "compile", lambda function: function)
    meta = torch.device("meta")
    plan = flex_backend(ROW_TOKENS, ROW_ANCHORS).plan(row(0)[0], 2, torch.float32, meta)
    assert {part.device for part in plan.mask.as_tuple() if isinstance(part, Tensor)} == {meta}
    some = torch.arange(3, device=meta)
    assert plan.mask.mask_mod(some, some, some, some).device == meta


def test_a_row_beyond_the_budgets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "compile", lambda function: function)
    backend = flex_backend(TILE_TOKENS, 2)
    layout = BlockLayout((1, 2), (0, 0), SIZE, None)
    plan = backend.plan(layout, 2, torch.float32, CPU)
    backend.attend(plan, *tensors(2 * SIZE, TILE_TOKENS, 0))
    with pytest.raises(AssertionError, match=r"^the packer keeps the token budget$"):
        backend.attend(plan, *tensors(2 * SIZE, TILE_TOKENS + 1, 0))
    with pytest.raises(AssertionError, match=r"^the packer keeps the anchor budget$"):
        backend.plan(BlockLayout((1, 2, 3), (0, 0, 0), SIZE, None), 2, torch.float32, CPU)


def test_no_grid_of_slots_and_keys_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "create_block_mask", None)
    anchors = tuple(range(1, 2049, 4))
    mask = build_mask(BlockLayout(anchors, (0,) * 512, 8, None), 2048, 4096, CPU)
    largest = max(part.numel() for part in mask.as_tuple() if isinstance(part, Tensor))
    assert largest == (4096 // 128) * (6144 // 128)


@pytest.fixture(scope="module")
def compiled() -> Backend:
    """The backend as CUDA uses it. Its one compilation takes seconds to a minute."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler: flex attention on the CPU is compiled to C++")
    return flex_backend(ROW_TOKENS, ROW_ANCHORS)


@torch.no_grad()
def test_the_compiled_forward_is_dense_and_blockwise_for_every_row(compiled: Backend) -> None:
    """Full and sliding layers, several documents, grouped heads, padding: all of them warmed up by another row."""
    before = guard.count_compilations()

    def attend_once() -> None:
        layout = BlockLayout((1,), (0,), SIZE, None)
        compiled.attend(compiled.plan(layout, 2, torch.float32, CPU), *tensors(SIZE, 2, 0))

    first, again = warm_up([Signature("first", attend_once), Signature("again", attend_once)])
    assert (first.cache in ("miss", "hit"), len(first.compilations)) == (True, 1)
    assert (again.cache, again.compilations) == ("warm", ())
    assert first.seconds > 10 * again.seconds
    for seed in range(16):
        layout, tokens = row(seed)
        inputs = tensors(len(layout.anchors) * SIZE, tokens, seed)
        got = compiled.attend(compiled.plan(layout, 2, torch.float32, CPU), *inputs)
        dense = dense_mask(list(layout.anchors), list(layout.starts), SIZE, layout.window, tokens)
        for expected in (
            dense_attention(dense, *inputs),
            BLOCKWISE.attend(BLOCKWISE.plan(layout, 2, torch.float32, CPU), *inputs),
        ):
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert guard.count_compilations() == before + 1


@pytest.fixture
def front_end(flex_in_plain_operators: None) -> Backend:
    """A backend that traces and differentiates as on CUDA."""
    return flex_backend(ROW_TOKENS, ROW_ANCHORS)


def difference(backend: Backend, seed: int) -> float:
    """Largest difference from blockwise attention, of output and gradients, relative to the largest of each."""
    layout, tokens = row(seed)
    inputs = [x.requires_grad_() for x in tensors(len(layout.anchors) * SIZE, tokens, seed)]
    results = []
    for one in (backend, BLOCKWISE):
        out = one.attend(one.plan(layout, 2, torch.float32, CPU), *inputs)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
        results.append([out.detach(), *torch.autograd.grad(out, inputs, upstream)])
    largest = max(float(b.abs().max()) for b in results[1])
    return max(
        float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * largest) for a, b in zip(*results, strict=True)
    )


def test_gradients_are_those_of_blockwise_and_new_rows_compile_nothing(front_end: Backend) -> None:
    before = guard.count_compilations()
    differences = [difference(front_end, seed) for seed in range(12)]
    assert max(differences) <= 1e-5
    assert guard.count_compilations() - before == 1


def drafter_gradients(backend: Backend, *, checkpointing: bool) -> list[Tensor]:
    """Loss and every gradient of a drafter with full and sliding layers, for several rows."""
    made = tiny_drafter(layer_types=(FULL, SLIDING, FULL), sliding_window=3)
    drafter = Drafter(made.config, backend, checkpointing=checkpointing)
    drafter.load_state_dict(made.state_dict())
    source, rotary = row_source(random_documents(1, [40, 33, 61, 25, 50])), RotaryTable(made.config, 128, CPU)
    g = torch.Generator().manual_seed(0)
    embedding, losses = torch.randn(64, 32, generator=g), []
    for index in range(3):
        row = source.row(index)
        blocks = make_blocks(row, block_size=4, mask_token=63, gamma=4.0)
        features = torch.randn(len(row.tokens_T), 96, generator=g)
        hidden = drafter(features, row.positions_T, blocks, embedding, rotary)
        losses.append(block_loss(hidden, blocks, embedding, made.config.head_scaling).loss)
        losses[-1].backward()
    return [torch.stack(losses).detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)]


def test_a_drafter_trains_alike_and_recomputes_compiled(front_end: Backend) -> None:
    expected = drafter_gradients(BLOCKWISE, checkpointing=False)
    before = guard.count_compilations()
    for checkpointing in (False, True):
        found = drafter_gradients(front_end, checkpointing=checkpointing)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= 2e-5 * b.abs().max()
    assert guard.count_compilations() == before + 1
