"""Moving features and blocks to a drafter's device: the one place that knows streams and pinned memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.nouns import Blocks


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; the same object if it is there already.

    From one GPU to another the copy is peer to peer; the producer has synchronised its stream before handing over
    (`settle`), so nothing overtakes the computation. The producer's allocator is told which stream still reads the
    tensor, so its memory is not given out again too early. From the host the copy goes through pinned memory, which
    alone makes it asynchronous.
    """
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
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


@contextmanager
def worker_stream(device: torch.device) -> Iterator[None]:
    """Runs a worker on its device, on a stream of its own: two workers on one GPU overlap."""
    if device.type != "cuda":
        yield
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def release_memory(device: torch.device) -> None:
    """After memory ran out: gives cached blocks of the device back, so that smaller ones can be made of them."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def settle(device: torch.device) -> None:
    """Waits until what this thread queued on `device` is done, so that another thread's stream may read it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
