"""Key/value caches of the two models, and the one place that rolls the target's back."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from draftsmith.drafter.config import DrafterConfig
from draftsmith.errors import InputError


class ContextLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one attention layer in memory allocated once; forgetting is a smaller `length`.

    It also stands in for transformers' sliding layers: it keeps every key, and the mask that the model makes from
    `get_mask_sizes` applies the window. So a rollback brings back whatever the window needs, without the library's
    recording, whose rules differ between its versions.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates [batch, G, capacity, D] for keys and for values."""
        self.keys = key_states.new_empty((*key_states.shape[:-2], self.capacity, key_states.shape[-1]))
        self.values = value_states.new_empty((*value_states.shape[:-2], self.capacity, value_states.shape[-1]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends tokens [batch, G, T, D]; gives all keys and values so far, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        assert end <= self.capacity, f"{end} tokens in a cache for {self.capacity}"
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        if self.is_initialized:  # a layer that shares another's keys stays empty
            self.length -= abs(tokens_to_remove)

    def gather(self, rows: Tensor, start: int) -> None:
        """Keeps of the tokens behind `start` only `rows` (counted from `start`), in that order."""
        end = start + len(rows)
        for states in (self.keys, self.values):
            states[..., start:end, :] = states[..., start : self.length, :].index_select(-2, rows)
        self.length = end


class TargetCache:
    """A transformers cache that can forget the tokens that were not accepted.

    `arguments` are what a forward that reads and extends the cache is called with; transformers 5.24 renames the
    argument that 5.15 calls `past_key_values`.

    Args:
        capacity: the most tokens that are ever in it, those to be verified included.

    Raises:
        InputError: the model keeps states that cannot be rolled back; a wrong answer is never the outcome.
    """

    def __init__(self, model: Any, config: Any, capacity: int) -> None:
        names = signature(model.forward).parameters
        name = next((name for name in ("cache", "past_key_values") if name in names), None)
        if name is None:
            raise _refusal(config, f"{type(model).__name__} takes no key/value cache")
        self.config, self.length = config, 0
        self.cache = DynamicCache(config=config)
        self.cache.activate_past_recording()  # convolutions keep what a rollback brings back
        self.cache.layers = [
            ContextLayer(capacity) if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else layer
            for layer in self.cache.layers
        ]
        odd = sorted({type(layer).__name__ for layer in self.cache.layers if not hasattr(layer, "crop")})
        if odd or not self.cache.layers:
            raise _refusal(config, f"its cache ({', '.join(odd) or 'empty'}) cannot be rolled back")
        self.arguments: dict[str, Any] = {name: self.cache, "use_cache": True}

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps all its keys, so that any of them can be dropped, not only the last."""
        return all(isinstance(layer, ContextLayer) for layer in self.cache.layers)

    def extended(self, tokens: int) -> None:
        """To be called after each forward with the number of tokens it read.

        Raises:
            InputError: the forward kept a state of a kind that cannot be rolled back, or kept it somewhere else.
        """
        self.length += tokens
        for layer in self.cache.layers:
            if any(getattr(layer, "is_recurrent_states_initialized", {}).values()):
                raise _refusal(
                    self.config, "its linear attention keeps a recurrent state, which cannot be rolled back by tokens"
                )
        if self.is_plain and self.cache.get_seq_length() != self.length:
            raise _refusal(self.config, "it does not use the cache it is given")

    def forget(self, tokens: int) -> None:
        """Drops the last `tokens` tokens; to be called after each forward but the last, also with 0.

        The one caller of the library's `crop`: it takes negative counts, must not be given the length to keep, and even
        for 0 it trims the convolutions that recorded their past.
        """
        self.length -= tokens
        for layer in self.cache.layers:
            if tokens or not isinstance(layer, ContextLayer):
                layer.crop(-tokens)

    def keep(self, rows: Sequence[int], tokens: int) -> None:
        """Of the last `tokens` tokens, keeps only `rows` (ascending, counted from the first of them).

        Anything but a prefix needs `is_plain`.
        """
        kept = len(rows)
        if list(rows) == list(range(kept)):
            self.forget(tokens - kept)
            return
        start = self.length - tokens
        filled = [layer for layer in self.cache.layers if layer.is_initialized]
        rows_K = torch.tensor(rows, device=filled[0].keys.device)
        for layer in filled:
            layer.gather(rows_K.to(layer.keys.device), start)
        self.length = start + kept


def _refusal(config: Any, reason: str) -> InputError:
    return InputError(
        f"target.model {config.model_type}: {reason}; speculative decoding must take rejected tokens back, so this "
        "target cannot be used"
    )


class DraftCache:
    """Keys and values of the context, in memory allocated once for one sequence.

    A block's own stand behind the context while it is drafted; the next tokens of the context overwrite them.
    """

    def __init__(self, config: DrafterConfig, length: int, like: Tensor) -> None:
        shape = (len(config.layer_types), config.num_key_value_heads, length + config.block_size, config.head_dim)
        self.keys = like.new_empty(shape)
        self.values = like.new_empty(shape)
        self.length = 0

    def write(self, layer: int, keys_GTD: Tensor, values_GTD: Tensor) -> int:
        """Puts one layer's keys and values behind the context; gives where they end.

        They become context when the caller moves `length` there, after the last layer.
        """
        end = self.length + keys_GTD.shape[1]
        self.keys[layer, :, self.length : end] = keys_GTD
        self.values[layer, :, self.length : end] = values_GTD
        return end

    def read(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, T, D] of the positions from `first` to below `end`, as views."""
        return self.keys[layer, :, first:end], self.values[layer, :, first:end]
