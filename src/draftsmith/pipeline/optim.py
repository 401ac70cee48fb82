"""Optimizers and schedules. The learning rate is a pure function of the step, so a resumed run cannot jump."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafter.checkpoint import check_tensors
from draftsmith.errors import InputError

Schedule = Callable[[int, int], float]  # (step from 0, steps) -> factor of the peak learning rate


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), for matrices.

    The iteration runs in fp32 on CPU, where `torch.optim.Muon` crawls because it always iterates in bf16, and in bf16
    on CUDA. Matrices of one shape are iterated as one batch. The step is scaled by 0.2 * sqrt(max(rows, columns)), so
    that learning rates and weight decay are those of AdamW (Moonlight, arXiv 2502.16982).
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                shapes.setdefault(parameter.shape, []).append(parameter)
            for parameters in shapes.values():
                self._step_shape(group, parameters)

    def _step_shape(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        updates = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
            updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
        scale = 0.2 * math.sqrt(max(parameters[0].shape))
        for parameter, update in zip(parameters, orthogonalised(torch.stack(updates)), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly: five quintic Newton-Schulz steps on a batch [n, rows, columns]."""
    x = matrices if matrices.device.type == "cpu" else matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    out: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return out


def cosine(step: int, steps: int) -> float:
    """Down to zero over a half cosine."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def wsd(step: int, steps: int) -> float:
    """Warm-up, stable, decay: constant, then linear to zero over the last half (MiniCPM, arXiv 2404.06395)."""
    return min(1.0, 2 * (steps - step) / steps)


def constant(step: int, steps: int) -> float:
    return 1.0


SCHEDULES: dict[str, Schedule] = {"cosine": cosine, "wsd": wsd, "constant": constant}


def learning_rate_factor(schedule: str, warmup: float, step: int, steps: int) -> float:
    """Factor for step `step` (from 0): linear warm-up over `warmup * steps`, times the schedule."""
    warm = max(1.0, warmup * steps)
    return min(1.0, (step + 1) / warm) * SCHEDULES[schedule](step, steps)


class Optimizers:
    """The optimizer(s) of one replica behind one `step`. State travels as named tensors, without pickle."""

    def __init__(self, drafter: nn.Module, kind: str, *, lr: float, matrix_lr: float, weight_decay: float) -> None:
        matrices = [p for p in drafter.parameters() if p.ndim == 2]
        rest = [p for p in drafter.parameters() if p.ndim != 2]
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in drafter.named_parameters()}
        if kind == "muon":
            self._parts: list[torch.optim.Optimizer] = [
                Muon(matrices, matrix_lr, weight_decay=weight_decay),
                torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0),
            ]
        else:
            groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
            self._parts = [torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), weight_decay=weight_decay)]
        for part in self._parts:
            for group in part.param_groups:
                group["peak_lr"] = group["lr"]

    def step(self, factor: float) -> float:
        """One update at `factor` times the peak learning rates; returns the learning rate of the first group."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = group["peak_lr"] * factor
            part.step()
        return float(self._parts[0].param_groups[0]["lr"])

    def state(self) -> dict[str, Tensor]:
        """All state as `parameter name / state name`, on the CPU."""
        return {
            f"{self._names[parameter]}/{key}": value.detach().cpu().contiguous()
            for part in self._parts
            for parameter, state in part.state.items()
            for key, value in state.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back what `state` gave: nothing if no step was taken, else all of it.

        Raises:
            InputError: it is the state of another drafter or optimizer.
        """
        places = {
            f"{self._names[parameter]}/{key}": (part, parameter, key)
            for part in self._parts
            for group in part.param_groups
            for parameter in group["params"]
            for key in _STATE[type(part)]
        }
        if tensors:
            shapes = {name: torch.Size() if key == "step" else p.shape for name, (_, p, key) in places.items()}
            _check(tensors, shapes, "optimizer state")
        for name, value in tensors.items():
            part, parameter, key = places[name]
            device = "cpu" if key == "step" else parameter.device
            part.state[parameter][key] = value.to(device, copy=True)


_STATE: Mapping[type, tuple[str, ...]] = {Muon: ("momentum",), torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq")}


def load_weights(drafter: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts back the weights of a checkpoint.

    Raises:
        InputError: they are another drafter's.
    """
    _check(tensors, {name: tensor.shape for name, tensor in drafter.state_dict().items()}, "weights")
    drafter.load_state_dict(tensors)


def _check(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], what: str) -> None:
    """A checkpoint whose checksums fit can still be that of another run."""
    place = f"resume: the checkpoint's {what}"
    check_tensors(tensors, shapes, place, "this run's drafter has")
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise InputError(f"{place}: {name} is {tensor.dtype}, not torch.float32; remove this checkpoint")
        if not tensor.isfinite().all():
            raise InputError(f"{place}: {name} holds NaN or infinite values; remove this checkpoint")
