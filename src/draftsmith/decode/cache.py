"""Key/value caches of the two models, and the one place that rolls the target's back."""

from inspect import signature
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from draftsmith.drafter.config import DrafterConfig
from draftsmith.errors import InputError


class TargetCache:
    """A transformers cache that can forget the tokens that were not accepted.

    `arguments` are what a forward that reads and extends the cache is called with; transformers 5.24 renames the
    argument that 5.15 calls `past_key_values`.

    Raises:
        InputError: the model keeps states that cannot be rolled back; a wrong answer is never the outcome.
    """

    def __init__(self, model: Any, config: Any) -> None:
        self.cache = DynamicCache(config=config)
        self.cache.activate_past_recording()  # sliding layers keep what a rollback brings back into their window
        if not self.cache.is_croppable:
            kinds = sorted({type(layer).__name__ for layer in self.cache.layers})
            raise InputError(f"target.model {config.model_type}: its cache ({', '.join(kinds)}) cannot be rolled back")
        name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        self.arguments: dict[str, Any] = {name: self.cache, "use_cache": True}

    def forget(self, tokens: int) -> None:
        """Drops the last `tokens` tokens. transformers takes a negative count; 0 must not be passed on."""
        if tokens:
            self.cache.crop(-tokens)


class DraftCache:
    """Keys and values of the context, preallocated for one sequence. The block's own are never stored."""

    def __init__(self, config: DrafterConfig, length: int, like: Tensor) -> None:
        shape = (len(config.layer_types), config.num_key_value_heads, length, config.head_dim)
        self.keys = like.new_empty(shape)
        self.values = like.new_empty(shape)
        self.length = 0

    def append(self, layer: int, keys_GTD: Tensor, values_GTD: Tensor) -> None:
        """Writes one layer's keys and values behind `length`; the caller moves `length` after the last layer."""
        place = slice(self.length, self.length + keys_GTD.shape[1])
        self.keys[layer, :, place] = keys_GTD
        self.values[layer, :, place] = values_GTD

    def read(self, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, T, D] of the context from position `first` on."""
        return self.keys[layer, :, first : self.length], self.values[layer, :, first : self.length]
