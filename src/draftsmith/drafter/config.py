"""The shape of a drafter, and its `config.json` as the reference package, vLLM and SGLang read it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from draftsmith.drafter.loss import HeadScaling
from draftsmith.drafter.traps import check_traps
from draftsmith.errors import InputError

FULL, SLIDING = "full_attention", "sliding_attention"
MOST, MOST_SLOTS, MOST_WINDOW = (
    2**24,
    2**16,
    2**31 - 1,
)  # beyond any model; larger sizes overflow where shapes are multiplied


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Everything a loader needs; nothing is recomputed from defaults when a checkpoint is read.

    `target_layer_ids` are the taps: the *outputs* of those target layers. `layer_types` gives each draft layer
    `full_attention` (bidirectional in the block) or `sliding_attention` (causal in the block, `sliding_window` keys).
    `rope_parameters` is the transformers dictionary with `rope_type` and `rope_theta`. `is_causal` overrides what the
    layer types say about the block, for every layer; such drafters of other trainers can be evaluated, not trained.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: int
    attention_bias: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    is_causal: bool | None = None

    def __post_init__(self) -> None:
        heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
        for name in ("hidden_size", "intermediate_size", *heads, "vocab_size", "max_position_embeddings"):
            if not 1 <= getattr(self, name) <= MOST:
                raise InputError(f"{name} is {getattr(self, name)}: expected 1 to {MOST}")
        if not 2 <= self.block_size <= MOST_SLOTS:
            raise InputError(
                f"block_size is {self.block_size}: a block needs the anchor and one slot, so 2 to {MOST_SLOTS}"
            )
        self._check_numbers()
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if SLIDING in self.layer_types and not 1 <= (self.sliding_window or 0) <= MOST_WINDOW:
            raise InputError(
                f"layer_types has a sliding layer, so sliding_window must be given, 1 to {MOST_WINDOW}; it is "
                f"{self.sliding_window}"
            )
        unknown = set(self.layer_types) - {FULL, SLIDING}
        if unknown or not self.layer_types:
            raise InputError(f"layer_types must be a list of {FULL!r} and {SLIDING!r}, got {list(self.layer_types)}")
        taps, top = self.target_layer_ids, self.num_target_layers - 2
        if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > top:
            raise InputError(
                f"target_layer_ids is {list(taps)}: expected ascending layers within 0..{top} of the target's "
                f"{self.num_target_layers} (the last one's output is read before its norm by some, after it by others)"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(f"mask_token_id is {self.mask_token_id}, outside the vocabulary of {self.vocab_size}")

    def _check_numbers(self) -> None:
        """What is multiplied or divided by: finite and positive."""
        positive = {
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_parameters.get("rope_theta"),
            "output_multiplier": self.output_multiplier,
            "final_logit_softcapping": 1.0 if self.final_logit_softcapping is None else self.final_logit_softcapping,
            "input_embedding_scale": self.input_embedding_scale,
        }
        if self.rope_parameters.get("rope_type", "default") != "default":
            positive["rope_parameters.factor"] = self.rope_parameters.get("factor")
        for name, value in self.rope_parameters.items():
            if isinstance(value, bool) and name != "truncate":  # yarn's only switch
                raise InputError(f"rope_parameters.{name} is {value}: expected a number")
        for name, value in positive.items():
            if not isinstance(value, int | float) or not 0 < value < inf:
                raise InputError(f"{name} is {value!r}: expected a positive number")

    @property
    def feature_size(self) -> int:
        """F: what the target hands over per token."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def head_scaling(self) -> HeadScaling:
        return HeadScaling(self.output_multiplier, self.final_logit_softcapping)

    def window(self, layer: int) -> int | None:
        """The window of a draft layer, None for a full one."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """Whether a slot of this layer is blind to the later slots of its block."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The z-lab layout. Keys whose absence some loader fills with another value are always written; `is_causal`
        is not unless it says something else than the layer types, because SGLang has not always read it."""
        dflash: dict[str, Any] = {
            "target_layer_ids": list(self.target_layer_ids),
            "mask_token_id": self.mask_token_id,
            "block_size": self.block_size,
        }
        if self.input_embedding_scale != 1.0:
            dflash["input_embedding_scale"] = self.input_embedding_scale
        if self.output_multiplier != 1.0:
            dflash["output_multiplier"] = self.output_multiplier
        if self.final_logit_softcapping is not None:
            dflash["final_logit_softcapping"] = self.final_logit_softcapping
        scaling = {k: v for k, v in self.rope_parameters.items() if k != "rope_theta"}
        causality = {} if self.is_causal is None else {"is_causal": self.is_causal}
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **causality,
            "block_size": self.block_size,
            "dflash_config": dflash,
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": len(self.layer_types),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_parameters["rope_theta"],
            "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
            "rope_parameters": dict(self.rope_parameters),
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": SLIDING in self.layer_types,
            "max_window_layers": sum(kind == FULL for kind in self.layer_types),
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "dtype": dtype,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: Path) -> "DrafterConfig":
        """Reads a z-lab `config.json`, also one of a published drafter.

        Raises:
            InputError: a needed key is missing, or the file asks for something that loaders read differently.
        """
        nested = data.get("dflash_config") if isinstance(data, Mapping) else None
        if not isinstance(data, Mapping) or not isinstance(nested or {}, Mapping):
            raise InputError(f"{source}: expected an object with an object dflash_config; this is no drafter's config")
        nested = nested or {}
        if data.get("architectures") != ["DFlashDraftModel"]:
            raise InputError(f"{source}: architectures is {data.get('architectures')}, expected ['DFlashDraftModel']")

        def need(key: str) -> Any:
            value = nested.get(key, data.get(key))
            if value is None:
                raise InputError(f"{key} is missing; a drafter checkpoint must say it")
            return value

        try:
            check_traps(data)
            return cls._parsed(data, nested, need)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise InputError(f"{source}: a value has the wrong type: {error}") from None

    @classmethod
    def _parsed(cls, data: Mapping[str, Any], nested: Mapping[str, Any], need: Callable[[str], Any]) -> "DrafterConfig":
        rope = data.get("rope_parameters") or {
            "rope_type": "default",
            **(data.get("rope_scaling") or {}),
            "rope_theta": float(need("rope_theta")),
        }
        layers = tuple(data.get("layer_types") or [FULL] * int(need("num_hidden_layers")))
        softcap, window = nested.get("final_logit_softcapping"), data.get("sliding_window")
        is_causal = data.get("is_causal")
        if all(is_causal == (kind == SLIDING) for kind in layers):  # it says what the kinds say already
            is_causal = None
        return cls(
            hidden_size=int(need("hidden_size")),
            intermediate_size=int(need("intermediate_size")),
            num_attention_heads=int(need("num_attention_heads")),
            num_key_value_heads=int(need("num_key_value_heads")),
            head_dim=int(need("head_dim")),
            vocab_size=int(need("vocab_size")),
            rms_norm_eps=float(need("rms_norm_eps")),
            rope_parameters=dict(rope),
            max_position_embeddings=int(need("max_position_embeddings")),
            attention_bias=bool(data.get("attention_bias", False)),
            layer_types=layers,
            sliding_window=None if window is None else int(window),
            block_size=int(need("block_size")),
            target_layer_ids=tuple(int(tap) for tap in need("target_layer_ids")),
            num_target_layers=int(need("num_target_layers")),
            mask_token_id=int(need("mask_token_id")),
            input_embedding_scale=float(nested.get("input_embedding_scale", 1.0)),
            output_multiplier=float(nested.get("output_multiplier", 1.0)),
            final_logit_softcapping=None if softcap is None else float(softcap),
            is_causal=None if is_causal is None else bool(is_causal),
        )

    @classmethod
    def read(cls, folder: Path) -> "DrafterConfig":
        """From `folder/config.json`.

        Raises:
            InputError: as `from_json`, or the folder has another layout.
        """
        path = folder / "config.json"
        data = read_json(path)
        if isinstance(data, Mapping) and "speculators_model_type" in data:
            raise InputError(f"{path} is in the speculators layout; first: draftsmith import {folder} OUT")
        return cls.from_json(data, path)


def read_json(path: Path) -> Any:
    """The content of a drafter's `config.json`.

    Raises:
        InputError: the file is not there, or no JSON.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist: {path.parent} is not a drafter folder")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
