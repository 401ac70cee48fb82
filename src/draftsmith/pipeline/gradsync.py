"""One gradient for all drafter replicas: flat buffers, summed in fixed order, divided once, clipped once."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftsmith.errors import StoppedError
from draftsmith.pipeline.transfer import settle


class FlatGradients:
    """Gradients of a replica as views into one buffer, so that a sum over replicas is one addition each.

    `touched` turns True when a backward adds to any of them; who wants to know sets it to False before.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), device=self.parameters[0].device)
        self.touched = False
        offset = 0
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._touch)  # type: ignore[no-untyped-call]
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def zero(self) -> None:
        self.flat.zero_()

    def _touch(self, parameter: Tensor) -> None:
        self.touched = True


class GradientSync:
    """The meeting point of the replicas, once per step.

    Owner: the run. Every replica calls `reduce` once per step, in any order; all leave with the same sums, added in
    replica order, so the result does not depend on who came first. `abort` releases whoever waits (`StoppedError`).
    """

    def __init__(self, replicas: int) -> None:
        self._barrier = threading.Barrier(replicas)
        self._gradients: list[Tensor | None] = [None] * replicas
        self._totals: list[Tensor | None] = [None] * replicas

    def reduce(self, replica: int, gradients: FlatGradients, totals: Tensor) -> Tensor:
        """Replaces this replica's gradient by the sum over all, and returns the sum of the `totals` vectors.

        Args:
            replica: this replica's number.
            gradients: its flat gradient, changed in place.
            totals: small vector of counts on the same device (loss, weight, tokens ...).
        """
        if len(self._gradients) == 1:
            return totals
        try:
            self._gradients[replica], self._totals[replica] = gradients.flat, totals
            settle(gradients.flat.device)
            self._barrier.wait()
            device = gradients.flat.device
            flat_sum = _ordered_sum(self._gradients, device)
            totals_sum = _ordered_sum(self._totals, device)
            settle(device)
            self._barrier.wait()  # nobody overwrites a buffer that another still reads
            gradients.flat.copy_(flat_sum)
            return totals_sum
        except threading.BrokenBarrierError:
            raise StoppedError("another replica has stopped") from None

    def abort(self) -> None:
        self._barrier.abort()


def _ordered_sum(parts: Sequence[Tensor | None], device: torch.device) -> Tensor:
    first, *others = [part for part in parts if part is not None]
    total = first.to(device, copy=True)
    for part in others:
        total += part.to(device)
    return total


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """Factor that brings a gradient of this norm down to `limit`, at most 1."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)
