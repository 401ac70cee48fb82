"""How a new drafter starts: from the target's own last layers, from chance, or from a drafter somebody trained."""

from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.decisions import Decision
from draftsmith.drafter.checkpoint import check_tensors
from draftsmith.drafter.model import Drafter


def random_init(drafter: Drafter, seed: int) -> None:
    """Normal(0, 0.02) matrices, unit norms; the same on every machine for a seed."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.02)
            else:
                parameter.fill_(1.0)


def init_from_target(drafter: Drafter, layers: nn.ModuleList, final_norm: nn.Module | None, seed: int) -> Decision:
    """Copies the target's last layers and final norm where shapes allow, and lets `fc` pass the last tap through.

    The layer above the last tap would read exactly that tap's output through its own input norm, so the first draft
    layer starts as a working piece of the target. What has no counterpart starts at random.

    Args:
        drafter: changed in place.
        layers: the target's decoder layers.
        final_norm: the norm before the target's head, if it was found.
        seed: for what starts at random.
    """
    random_init(drafter, seed)
    count, hidden = len(drafter.layers), drafter.config.hidden_size
    sources = list(layers)[-count:] if count <= len(layers) else []
    copied = missing = 0
    with torch.no_grad():
        for layer, source in zip(drafter.layers, sources, strict=False):
            for name, parameter in layer.named_parameters():
                value = _counterpart(source, name, parameter)
                copied, missing = (copied + 1, missing) if value is not None else (copied, missing + 1)
                if value is not None:
                    parameter.copy_(value)
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -hidden:] = torch.eye(hidden)
        entry = _norm_weight(getattr(sources[0], "input_layernorm", None), hidden) if sources else None
        if entry is not None:
            drafter.hidden_norm.weight.copy_(entry)
        last = _norm_weight(final_norm, hidden)
        if last is not None:
            drafter.norm.weight.copy_(last)
    first = len(layers) - count
    return Decision(
        "drafter start",
        "target",
        f"layers {first}..{len(layers) - 1} of the target: {copied} tensors copied, {missing} without a counterpart "
        f"of the same shape; fc passes tap {drafter.config.target_layer_ids[-1]} through",
    )


def _counterpart(source: nn.Module, name: str, parameter: Tensor) -> Tensor | None:
    module_name, _, leaf = name.rpartition(".")
    try:
        module = source.get_submodule(module_name)
    except AttributeError:
        return None
    if module_name.endswith("norm"):
        return _norm_weight(module, parameter.shape[0])
    value = getattr(module, leaf, None)
    return value.detach().float().cpu() if isinstance(value, Tensor) and value.shape == parameter.shape else None


def _norm_weight(norm: Any, size: int) -> Tensor | None:
    """The factor an RMS norm really applies, found by norming ones: a `1 + w` norm (Gemma, Qwen3.5) gives 1 + w."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != (size,) or getattr(norm, "bias", None) is not None:
        return None
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
    applied: Tensor = norm(torch.ones(1, size, dtype=weight.dtype, device=weight.device))[0]
    if not applied.abs().max() > 0:  # a norm that subtracts the mean turns ones into zeros: no RMS norm
        return None
    return applied.detach().float().cpu() * float((1 + eps) ** 0.5)


def init_from_checkpoint(drafter: Drafter, tensors: dict[str, Tensor], source: str) -> Decision:
    """Warm start: every tensor of the same name and shape; a shape that differs is an error, never skipped."""
    shapes = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
    check_tensors(tensors, shapes, f"drafter.init {source}", "this config needs")
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return Decision("drafter start", source, f"warm start, {len(tensors)} tensors")
