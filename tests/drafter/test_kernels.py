"""The attention of one chunk: the fused CPU kernel, the public one, and who decides between them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafter.attention import kernels
from draftsmith.drafter.attention.kernels import chunk_backward, chunk_forward, fused_cpu_available, gives_logsumexp

QUERIES, KEYS, HEADS, DIM = 6, 9, 3, 8


def tensors(count: int, length: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, length, DIM, generator=g) for _ in range(count)]


def masks() -> list[Tensor | None]:
    blocked = torch.zeros(1, 1, QUERIES, KEYS)
    blocked[..., :3, 4:] = float("-inf")
    return [None, blocked]


def scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    found = q @ k.mT * DIM**-0.5
    return found if mask is None else found + mask


@pytest.mark.parametrize("mask", masks(), ids=["no mask", "masked"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused kernel", "public SDPA"])
def test_forward_and_backward_are_softmax(fused: bool, mask: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_FUSED_CPU", fused)
    (q,), (k, v), (grad,) = tensors(1, QUERIES, 0), tensors(2, KEYS, 1), tensors(1, QUERIES, 2)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = scores(inputs[0], inputs[1], mask).softmax(-1) @ inputs[2]
    out, logsumexp = chunk_forward(q, k, v, mask)
    torch.testing.assert_close(out, expected.detach())
    sums = scores(q, k, mask).logsumexp(-1)
    if fused:
        assert logsumexp is not None
        torch.testing.assert_close(logsumexp, sums)
    else:
        assert logsumexp is None
    with torch.no_grad():  # as inside the backward of an autograd function
        got = chunk_backward(grad, q, out, sums, k, v, mask)
    for mine, wanted in zip(got, torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(mine, wanted)
    assert not any(x.requires_grad for x in (q, k, v))


def test_gradients_over_some_of_the_keys_are_their_share() -> None:
    """With the output and log-sum-exp of all keys, two halves give the gradients of the whole."""
    (q,), (k, v), (grad,) = tensors(1, QUERIES, 0), tensors(2, KEYS, 1), tensors(1, QUERIES, 2)
    out, sums = chunk_forward(q, k, v, None)
    assert sums is not None
    whole = chunk_backward(grad, q, out, sums, k, v, None)
    near, far = (chunk_backward(grad, q, out, sums, k[:, :, s], v[:, :, s], None) for s in (slice(4), slice(4, None)))
    torch.testing.assert_close(near[0] + far[0], whole[0])
    for half, other, both in zip(near[1:], far[1:], whole[1:], strict=True):
        torch.testing.assert_close(torch.cat([half, other], 2), both)


def operator(*arguments: str) -> Any:
    schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in arguments])
    return SimpleNamespace(default=SimpleNamespace(_schema=schema))


@pytest.mark.parametrize("missing", ["", "_backward"], ids=["forward", "backward"])
@pytest.mark.parametrize("how", ["not there", "other arguments"])
def test_the_private_operator_is_used_only_as_it_was_tested(
    missing: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch without one of the two operators, or with another signature, uses the public one."""
    assert fused_cpu_available(), "this torch lacks the tested kernel: add its schema or drop the version"
    assert kernels._FUSED_CPU
    name = "_scaled_dot_product_flash_attention_for_cpu"
    forward = ["query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"]
    backward = ["grad_out", "query", "key", "value", "out", "logsumexp", *forward[3:]]
    there = {name: operator(*forward), f"{name}_backward": operator(*backward)}
    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace(**there))
    assert fused_cpu_available()
    if how == "not there":
        del there[name + missing]
    else:
        there[name + missing] = operator("query", "key", "value")
    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace(**there))
    assert not fused_cpu_available()


def test_only_the_fused_kernel_on_a_cpu_tells_the_logsumexp(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gives_logsumexp(torch.device("cpu"))
    assert not gives_logsumexp(torch.device("cuda:0"))
    monkeypatch.setattr(kernels, "_FUSED_CPU", False)
    assert not gives_logsumexp(torch.device("cpu"))
