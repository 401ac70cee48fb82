"""Muon with a float32 Newton-Schulz iteration, batched over matrices of one shape.

`torch.optim.Muon` iterates in bfloat16, one matrix at a time, which is slow on CPUs.
Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; update scale as in Liu et al.
2025, "Muon is scalable for LLM training".
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def orthogonalise(matrices_NRC: Tensor, iterations: int = 5) -> Tensor:
    """Approximately the nearest orthogonal matrix of each, by the quintic Newton-Schulz iteration."""
    tall = matrices_NRC.shape[-2] > matrices_NRC.shape[-1]
    x = matrices_NRC.mT if tall else matrices_NRC
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; for weight matrices only."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                updates = orthogonalise(torch.stack([self._momentum(m, group["momentum"]) for m in matrices]))
                scale = group["lr"] * 0.2 * math.sqrt(max(shape))
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _momentum(self, matrix: Tensor, momentum: float) -> Tensor:
        """The Nesterov look-ahead gradient; updates the running average."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if "average" not in state:
            state["average"] = torch.zeros_like(matrix)
        average: Tensor = state["average"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(average, momentum)
