"""The drafter's own backwards against autograd's, and its rotation against transformers'."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from conftest import tiny_config
from draftsmith.drafter.model import RMSNorm, RotaryTable, gated, rotate


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())


@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 16)])
def test_the_norm_and_its_gradients_are_the_librarys(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    norm = RMSNorm(16, 1e-2)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(16, generator=g) + 0.5)
    x = torch.randn(shape, generator=g).transpose(0, -2).requires_grad_()  # a gradient that is not contiguous, too
    upstream = torch.randn(shape, generator=g).transpose(0, -2)
    ours, expected = norm(x), F.rms_norm(x, (16,), norm.weight, 1e-2)
    assert close(ours, expected)
    leaves = (x, norm.weight)
    pairs = zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    )
    assert all(close(a, b) for a, b in pairs)
    with torch.no_grad():
        assert close(norm(x), expected)


def test_the_rotation_and_its_gradient_are_transformers() -> None:
    rotary = RotaryTable(tiny_config(), 64, torch.device("cpu"))
    positions = torch.tensor([3, 0, 40, 63, 7])
    cos, sin = rotary.at(positions)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 5, 8, generator=g).requires_grad_()
    upstream = torch.randn(4, 5, 8, generator=g)
    expected = apply_rotary_pos_emb(x[None], x[None], cos[None], sin[None])[0][0]
    assert close(rotate(x, (cos, sin)), expected)
    ours = torch.autograd.grad(rotate(x, (cos, sin)), x, upstream)[0]
    assert close(ours, torch.autograd.grad(expected, x, upstream)[0])
    with torch.no_grad():
        assert close(rotate(x, (cos, sin)), expected)


def test_the_gate_and_its_gradients_are_autograds() -> None:
    g = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(6, 10, generator=g).requires_grad_() for _ in range(2))
    upstream = torch.randn(10, 6, generator=g).T
    expected = F.silu(gate) * up
    assert close(gated(gate, up), expected)
    pairs = zip(
        torch.autograd.grad(gated(gate, up), (gate, up), upstream),
        torch.autograd.grad(expected, (gate, up), upstream),
        strict=True,
    )
    assert all(close(a, b) for a, b in pairs)
    with torch.no_grad():
        assert close(gated(gate, up), expected)
