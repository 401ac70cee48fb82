"""The layout of speculators 0.9: taps + 1, a nested transformer config, copies of the target's frozen weights inside.

Where its readers differ, one value means the same to all: `sliding_window_non_causal` is true, because vLLM 0.33.0
makes every layer causal where it is false, while speculators looks at it for sliding layers only (and a drafter with
sliding layers is not written in this layout). `model_type` is absent at the top, because vLLM recognises the layout by
that.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafter.config import SLIDING, DrafterConfig
from draftsmith.errors import InputError

VERSION = "0.9.0"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Stored by speculators, of this or an earlier version, and the target's own: a drafter does not need them.
FROZEN = (EMBEDDING, HEAD, "verifier_lm_head.weight", "verifier_norm.weight")
# Keys of a z-lab config that have their own places, or none, in this layout.
_OUTSIDE = ("architectures", "block_size", "dflash_config", "num_target_layers")


def is_speculators(data: Any) -> bool:
    """Whether a `config.json` is of this layout."""
    return isinstance(data, Mapping) and "speculators_model_type" in data


def to_json(config: DrafterConfig, dtype: str, verifier: str | None, verifier_classes: list[str]) -> dict[str, Any]:
    """The whole `config.json`. `num_target_layers` is ours: other readers ignore it, ours needs it for the way back.

    Args:
        config: without sliding layers and scales.
        dtype: of the tensors, e.g. `bfloat16`.
        verifier: folder or hub id of the target; None if the target is a base with an adapter, which has no name.
        verifier_classes: `architectures` of the target's config.
    """
    layers = {key: value for key, value in config.to_json(dtype).items() if key not in _OUTSIDE}
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": verifier_classes},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def from_json(data: Mapping[str, Any], source: Path, target_layers: int | None) -> DrafterConfig:
    """Reads a `config.json` of this layout, also one that speculators wrote.

    Args:
        data: the file's content.
        source: the file, for errors.
        target_layers: depth of the target, which files of others do not hold.

    Raises:
        InputError: it is no DFlash drafter, a key is missing, or readers would not agree about it.
    """
    kind, layers = data["speculators_model_type"], data.get("transformer_layer_config")
    if kind != "dflash":
        raise InputError(f"{source}: speculators_model_type is {kind!r}; only dflash drafters are supported")
    if not isinstance(layers, Mapping):
        raise InputError(f"{source}: transformer_layer_config is missing")
    depth = target_layers or data.get("num_target_layers")
    if depth is None:
        raise InputError(f"{source}: a speculators config does not say how deep its target is; give it with --target")
    for key in ("aux_hidden_state_layer_ids", "block_size", "mask_token_id"):
        if data.get(key) is None:
            raise InputError(f"{source}: {key} is missing; a drafter checkpoint must say it")
    if layers.get("is_causal") is not None:
        raise InputError(f"{source}: transformer_layer_config.is_causal is set, which only vLLM reads")
    try:
        taps = [int(layer) - 1 for layer in data["aux_hidden_state_layer_ids"]]
        causality = _causality(data, layers, source)
    except InputError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"{source}: a value has the wrong type: {error}") from None
    zlab = {
        **layers,
        **causality,
        **{key: data[key] for key in ("draft_vocab_size", "target_hidden_size", "quantization_config") if key in data},
        "architectures": ["DFlashDraftModel"],
        "block_size": data["block_size"],
        "num_target_layers": depth,
        "dflash_config": {
            "target_layer_ids": taps,
            "mask_token_id": data["mask_token_id"],
            "block_size": data["block_size"],
            "sample_from_anchor": data.get("sample_from_anchor", False),
        },
    }
    return DrafterConfig.from_json(zlab, source)


def _causality(data: Mapping[str, Any], layers: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """What the one flag says about sliding layers, as speculators reads it; full layers are never causal."""
    if SLIDING not in (layers.get("layer_types") or []):
        return {}
    flag = data.get("sliding_window_non_causal")
    if flag is None:
        raise InputError(
            f"{source}: sliding_window_non_causal is missing; speculators takes false then, vLLM takes true"
        )
    return {"is_causal": False} if flag else {}


def without_frozen(tensors: Mapping[str, Tensor], config: DrafterConfig, source: Path) -> dict[str, Tensor]:
    """The drafter's own tensors.

    Raises:
        InputError: an embedding or head inside has another shape than the target's, or the vocabulary is reduced.
    """
    for name in ("t2d", "d2t"):
        if name in tensors:
            raise InputError(f"{source}: {name} maps a reduced vocabulary, which is not supported")
    for name in (EMBEDDING, HEAD):
        shape = tuple(tensors[name].shape) if name in tensors else (config.vocab_size, config.hidden_size)
        if shape != (config.vocab_size, config.hidden_size):
            raise InputError(f"{source}: {name} is {shape}, config.json says {(config.vocab_size, config.hidden_size)}")
    return {name: tensor for name, tensor in tensors.items() if name not in FROZEN}


def frozen_copies(embedding_VH: Tensor, head_VH: Tensor, config: DrafterConfig) -> dict[str, Tensor]:
    """The target's embedding and head as speculators stores them, each in memory of its own.

    Raises:
        InputError: the target has another vocabulary or width than the drafter was made for.
    """
    copies = {EMBEDDING: embedding_VH, HEAD: head_VH}
    for name, weight in copies.items():
        if tuple(weight.shape) != (config.vocab_size, config.hidden_size):
            raise InputError(
                f"the target's {name} is {tuple(weight.shape)}, the drafter's vocabulary and width are "
                f"{(config.vocab_size, config.hidden_size)}: it was made for another target"
            )
    return {name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in copies.items()}


def check_frozen(stored: Mapping[str, Tensor], frozen: Mapping[str, Tensor], place: str, target: str) -> None:
    """What is left out must be the target's own, or the drafter would change.

    Raises:
        InputError: an embedding or head inside has other values, beyond the rounding of its dtype.
    """
    for name, weight in frozen.items():
        if name in stored and not torch.equal(stored[name], weight.to(stored[name].dtype)):
            raise InputError(f"{place}: {name} is not that of {target}; only drafters on frozen copies are supported")
