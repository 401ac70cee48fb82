"""Hidden states of chosen layers, taken by our own hooks and handed to the calling thread alone.

`output_hidden_states` is not used: it returns the last state after the final norm, keeps all layers, and reads global
state of transformers that is not safe while another thread compiles.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError, InputError


class _LastTapReached(Exception):
    """Leaves the target's forward after the last layer that is needed."""


class _Call(threading.local):
    """What the forward that runs on this thread collects; None outside `collect`."""

    states: list[Tensor] | None = None
    stop: bool = False


class TapCapture:
    """Hooks on the tapped layers of one model. Installed once; every thread that calls the model has its own result.

    Threads may call the shared model at the same time: a hook writes only into the list of the thread it runs on.
    """

    def __init__(self, layers: nn.ModuleList, taps: Sequence[int]) -> None:
        self.taps = tuple(taps)
        self._call = _Call()
        for tap in self.taps:
            layers[tap].register_forward_hook(self._hook(tap))

    def _hook(self, tap: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._call.states is None:
                return
            self._call.states.append(output[0] if isinstance(output, tuple) else output)
            if self._call.stop and tap == self.taps[-1]:
                raise _LastTapReached

        return hook

    @contextmanager
    def collect(self, *, stop_after_last: bool) -> Iterator[list[Tensor]]:
        """Collects the tapped states [batch, T, H] of the forward that runs inside, in tap order.

        With `stop_after_last` the forward ends at the last tap: layers, norm and head above it cost nothing.
        """
        states: list[Tensor] = []
        self._call.states, self._call.stop = states, stop_after_last
        try:
            yield states
        except _LastTapReached:
            pass
        finally:
            self._call.states = None
        assert len(states) == len(self.taps), f"{len(states)} states for {len(self.taps)} taps"


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of the model's decoder layers: its only `ModuleList` with `num_hidden_layers` entries.

    Raises:
        InputError: there is none, or more than one.
    """
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise InputError(
            f"target.model: {type(model).__name__} has {len(found)} lists of {count} layers, expected exactly one; "
            "this architecture is not supported"
        )
    return found[0]


def default_taps(layers: int, wanted: int = 5) -> tuple[int, ...]:
    """The paper's choice of tapped layers, without repetition, never the last layer.

    Raises:
        InputError: the target has a single layer.
    """
    if layers < 2:
        raise InputError(f"target.model has {layers} layer(s); features need at least one layer below the last")
    if layers < 5:
        return tuple(range(layers - 1))
    if wanted == 1:
        return (layers // 2,)
    return tuple(sorted({round(1 + i * (layers - 4) / (wanted - 1)) for i in range(wanted)}))


def check_taps(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """An explicit list must be ascending, unique and below the last layer, whose output servers read elsewhere."""
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > layers - 2:
        raise ConfigError(
            f"drafter.taps is {list(taps)}: give ascending, unique layer ids within 0..{layers - 2} "
            f"(the target has {layers} layers; the last one cannot be tapped)"
        )
    return tuple(taps)


def concatenated(states: Sequence[Tensor]) -> Tensor:
    """Tapped states as one feature per token, [batch, T, F]."""
    return torch.cat(tuple(states), -1)
