"""Moving features and blocks to a drafter's device: the one place that knows streams and pinned memory."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.nouns import Blocks


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; the same object if it is there already.

    From one GPU to another the copy is peer to peer; the producer has synchronised its stream before handing over
    (`settle`), so the copy cannot overtake the computation. From the host it goes through pinned memory, which alone
    makes the copy asynchronous.
    """
    if tensor.device == device or device.type == "cpu":
        return tensor.to(device)
    if tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, non_blocking=True)


def blocks_to(blocks: Blocks, device: torch.device) -> Blocks:
    """All tensors of the blocks on `device`."""
    moved: dict[str, Any] = {
        field.name: to_device(value, device)
        for field in fields(blocks)
        if isinstance(value := getattr(blocks, field.name), Tensor)
    }
    return replace(blocks, **moved)


def settle(device: torch.device) -> None:
    """Waits until what this thread queued on `device` is done, so that another thread's stream may read it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
