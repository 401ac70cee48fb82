"""The chunked loss with its own gradient is plain cross-entropy through the head, value and gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from draftsmith.drafter import loss as loss_module
from draftsmith.drafter.loss import HeadScaling, block_loss, default_gamma
from draftsmith.nouns import Blocks

V, H, N, B = 53, 16, 7, 5
SCALINGS = [HeadScaling(), HeadScaling(multiplier=0.3), HeadScaling(softcap=3.0), HeadScaling(2.5, 4.0)]


def case(seed: int = 0, labels: int = 20, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Blocks, Tensor]:
    g = torch.Generator().manual_seed(seed)
    learned = torch.randperm(N * B, generator=g)[:labels].sort().values
    blocks = Blocks(
        tokens_NB=torch.zeros(N, B, dtype=torch.int64),
        positions_NB=torch.zeros(N, B, dtype=torch.int64),
        anchors=tuple(range(N)),
        starts=(0,) * N,
        learned_L=learned,
        labels_L=torch.randint(V, (labels,), generator=g),
        weights_L=torch.rand(labels, generator=g) + 0.1,
    )
    hidden = torch.randn(N * B, H, generator=g).to(dtype).requires_grad_()
    return hidden, blocks, torch.randn(V, H, generator=g).to(dtype)


def plain(hidden_QH: Tensor, blocks: Blocks, head_VH: Tensor, scaling: HeadScaling) -> Tensor:
    """Written from the definition: every label's logits at once, softmax by PyTorch, gradient by autograd."""
    raw = (hidden_QH[blocks.learned_L] @ head_VH.T).float() * scaling.multiplier
    logits = raw if scaling.softcap is None else scaling.softcap * torch.tanh(raw / scaling.softcap)
    return (blocks.weights_L * cross_entropy(logits, blocks.labels_L, reduction="none")).sum()


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("labels_per_chunk", [1, 6, 19, 20, 1000])
def test_value_and_gradient_are_plain_cross_entropy(
    scaling: HeadScaling, labels_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "chunk_labels", lambda vocab_size: labels_per_chunk)
    hidden, blocks, head = case()
    expected = plain(hidden, blocks, head, scaling)
    (wanted,) = torch.autograd.grad(expected, hidden)
    made = block_loss(hidden, blocks, head, scaling)
    (got,) = torch.autograd.grad(made.loss, hidden)
    torch.testing.assert_close(made.loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    untouched = sorted(set(range(N * B)) - set(blocks.learned_L.tolist()))
    assert not got[untouched].any()


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_gradient_is_the_slope(scaling: HeadScaling) -> None:
    """Central differences along random directions."""
    hidden, blocks, head = case(1)
    (gradient,) = torch.autograd.grad(block_loss(hidden, blocks, head, scaling).loss, hidden)
    for seed in range(5):
        direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed))
        step = 1e-2
        with torch.no_grad():
            up, down = (block_loss(hidden + s * direction, blocks, head, scaling).loss for s in (step, -step))
        assert float((up - down) / (2 * step)) == pytest.approx(float((gradient * direction).sum()), rel=2e-3, abs=2e-2)


def test_the_gradient_scales_with_what_is_above_it() -> None:
    hidden, blocks, head = case()
    (once,) = torch.autograd.grad(block_loss(hidden, blocks, head, HeadScaling()).loss, hidden)
    (scaled,) = torch.autograd.grad(block_loss(hidden, blocks, head, HeadScaling()).loss * -2.5, hidden)
    torch.testing.assert_close(scaled, once * -2.5)


def test_large_logits_stay_finite() -> None:
    hidden, blocks, head = case()
    made = block_loss(hidden, blocks, head * 1e4, HeadScaling())
    (gradient,) = torch.autograd.grad(made.loss, hidden)
    torch.testing.assert_close(made.loss, plain(hidden, blocks, head * 1e4, HeadScaling()))
    assert gradient.isfinite().all()


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_the_loss_is_summed_in_fp32_whatever_the_weights_are(default: torch.dtype) -> None:
    """In bf16 the sum of many small terms would stop growing. Also if the process makes its tensors in bf16."""
    hidden, blocks, head = case(dtype=torch.bfloat16)
    torch.set_default_dtype(default)
    try:
        made = block_loss(hidden, blocks, head, HeadScaling())
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.loss.dtype == made.weight.dtype == torch.float32
    torch.testing.assert_close(made.loss, plain(hidden, blocks, head, HeadScaling()), rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(made.loss, hidden)
    assert gradient.dtype == torch.bfloat16


def test_counts_and_hits_per_slot() -> None:
    hidden, blocks, head = case(2)
    made = block_loss(hidden, blocks, head, HeadScaling())
    best = (hidden[blocks.learned_L] @ head.T).argmax(-1)
    labels = best.clone()
    labels[::3] = (labels[::3] + 1) % V
    made = block_loss(hidden, _with(blocks, labels_L=labels), head, HeadScaling())
    slots = (blocks.learned_L % B).tolist()
    hits = (best == labels).tolist()
    assert made.count_B.tolist() == [slots.count(k) for k in range(B)]
    assert made.correct_B.tolist() == [sum(h for s, h in zip(slots, hits, strict=True) if s == k) for k in range(B)]
    assert 0 < sum(hits) < len(hits)
    assert float(made.weight) == pytest.approx(float(blocks.weights_L.sum()))


def test_every_slot_is_counted_also_where_the_last_ones_have_no_label() -> None:
    hidden, blocks, head = case(labels=2)
    only = _with(blocks, learned_L=torch.tensor([1, B + 1]))
    made = block_loss(hidden, only, head, HeadScaling())
    assert made.count_B.tolist() == [0, 2, 0, 0, 0]
    assert made.correct_B.shape == (B,)


def test_parts_add_up_to_one_denominator() -> None:
    """Sums of two rows over the summed weights are the rows' joint mean; a mean of means is not."""
    (h1, b1, head), (h2, b2, _) = case(3, labels=4), case(4, labels=30)
    first, second = block_loss(h1, b1, head, HeadScaling()), block_loss(h2, b2, head, HeadScaling())
    joint = block_loss(torch.cat([h1, h2]), _joined(b1, b2), head, HeadScaling())
    one = (first.loss + second.loss) / (first.weight + second.weight)
    torch.testing.assert_close(one, joint.loss / joint.weight)
    local = (first.loss / first.weight + second.loss / second.weight) / 2
    assert float((local - one).detach().abs()) > 1e-2
    gradients = torch.autograd.grad(one, [h1, h2], retain_graph=True)
    wanted = torch.autograd.grad(joint.loss / joint.weight, [h1, h2])
    for got, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, expected)


def test_no_label_is_no_loss() -> None:
    hidden, blocks, head = case(labels=0)
    made = block_loss(hidden, blocks, head, HeadScaling())
    assert float(made.loss.detach()) == float(made.weight) == 0.0
    assert not torch.autograd.grad(made.loss, hidden)[0].any()


def test_no_tensor_of_all_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "chunk_labels", {V: 4}.__getitem__)
    largest = 0
    original = HeadScaling.logits

    def watch(self: HeadScaling, raw_V: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, raw_V.shape[0])
        return original(self, raw_V)

    monkeypatch.setattr(HeadScaling, "logits", watch)
    hidden, blocks, head = case()
    block_loss(hidden, blocks, head, HeadScaling())
    assert largest == 4


def test_it_runs_where_the_tensors_are() -> None:
    """Without data here, since no second device is at hand."""
    meta = torch.device("meta")
    hidden, head = torch.zeros(6, H, device=meta, requires_grad=True), torch.zeros(V, H, device=meta)
    labels, weights = torch.zeros(6, dtype=torch.int64, device=meta), torch.ones(6, device=meta)
    total, correct = loss_module._FrozenHeadCrossEntropy.apply(hidden, labels, weights, head, HeadScaling())
    (gradient,) = torch.autograd.grad(total, hidden)
    assert total.device == correct.device == gradient.device == meta
    assert (total.dtype, correct.dtype, correct.requires_grad) == (torch.float32, torch.bool, False)


def test_without_scaling_nothing_is_copied() -> None:
    raw = torch.ones(2, V)
    assert HeadScaling().logits(raw) is raw
    assert HeadScaling().slope(raw) is None


def test_chunks_fill_a_cores_cache_but_are_never_tiny() -> None:
    assert [loss_module.chunk_labels(vocabulary) for vocabulary in (1024, 8192, 8193, 150_000)] == [1024, 128, 128, 128]
    assert loss_module.chunk_labels(1000) == 1048, "whole labels only"


def test_gamma_is_the_papers() -> None:
    """And on the lines through them."""
    assert [default_gamma(size) for size in (16, 10, 8)] == [7, 5, 4]
    assert [default_gamma(size) for size in (4, 7, 11, 13)] == pytest.approx([2, 3.5, 5 + 1 / 3, 6])


def _with(blocks: Blocks, **changes: Any) -> Blocks:
    fields = {name: getattr(blocks, name) for name in Blocks.__slots__}
    return Blocks(**(fields | changes))


def _joined(a: Blocks, b: Blocks) -> Blocks:
    return _with(
        a,
        learned_L=torch.cat([a.learned_L, b.learned_L + N * B]),
        labels_L=torch.cat([a.labels_L, b.labels_L]),
        weights_L=torch.cat([a.weights_L, b.weights_L]),
    )
