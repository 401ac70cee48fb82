"""How loaders read a drafter's config, replayed as facts: which key, in which order, with which default.

Read from the released wheels dflash 0.1.0, vllm 0.33.0, sglang 0.5.23 and speculators 0.9.0; each replay names the file
and function its facts stand in. vLLM and SGLang parse a z-lab `config.json` with transformers' `Qwen3Config`
(`model_type` qwen3), and so do we here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import Qwen3Config

from draftsmith.drafter.config import DrafterConfig

FROM_SLOT, FROM_ANCHOR = "counted from the slot", "counted from the anchor"


@dataclass(frozen=True)
class Layer:
    """Whom a slot sees: the window and where it is counted from (None: all), and whether later slots are hidden."""

    window: tuple[int, str] | None
    causal: bool


@dataclass(frozen=True)
class Reading:
    """What a loader makes of a config. `taps` are layers whose *output* is read, `slots` the anchor's included."""

    taps: tuple[int, ...]
    mask_token_id: int
    slots: int
    layers: tuple[Layer, ...]
    rope: Mapping[str, Any] = field(hash=False)
    sizes: tuple[int, ...]  # width, heads, key/value heads, head size, MLP, vocabulary
    eps: float
    bias: bool
    embedding_scale: float
    multiplier: float
    softcap: float | None


def ours(config: DrafterConfig) -> Reading:
    """What training and decoding do."""
    windows = [config.window(i) for i in range(len(config.layer_types))]
    return Reading(
        config.target_layer_ids,
        config.mask_token_id,
        config.block_size,
        tuple(Layer(w and (w, FROM_SLOT), config.causal(i)) for i, w in enumerate(windows)),
        dict(config.rope_parameters),
        (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.intermediate_size,
            config.vocab_size,
        ),
        config.rms_norm_eps,
        config.attention_bias,
        config.input_embedding_scale,
        config.output_multiplier,
        config.final_logit_softcapping,
    )


def _sizes(config: Any) -> tuple[int, ...]:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
    return tuple(getattr(config, name) for name in names)


def reference(data: Mapping[str, Any]) -> Reading:
    """dflash 0.1.0, `model.py`: `_draft_value` looks into `dflash_config` first and then at the top; a layer is causal
    if it slides, unless `is_causal` says otherwise for all; a window that is not causal reaches both ways."""
    config = Qwen3Config.from_dict(dict(data))
    nested = getattr(config, "dflash_config", {})

    def value(name: str, default: Any = None) -> Any:
        return nested.get(name, getattr(config, name, default))

    kinds = config.layer_types or ["full_attention"] * config.num_hidden_layers
    forced = getattr(config, "is_causal", None)
    layers = []
    for kind in kinds:
        slides = kind == "sliding_attention"
        window = (config.sliding_window, FROM_SLOT) if slides and config.sliding_window else None
        layers.append(Layer(window, slides if forced is None else bool(forced)))
    count, last = config.num_hidden_layers, config.num_target_layers - 3
    spread = [last // 2] if count == 1 else [round(1 + i * (last - 1) / (count - 1)) for i in range(count)]
    return Reading(
        tuple(value("target_layer_ids", spread)),
        value("mask_token_id"),
        int(value("block_size", 16)),
        tuple(layers),
        dict(config.rope_parameters),
        _sizes(config),
        config.rms_norm_eps,
        config.attention_bias,
        float(value("input_embedding_scale", 1.0)),
        float(value("output_multiplier", 1.0)),
        value("final_logit_softcapping"),
    )


def _vllm(config: Any, num_speculative_tokens: int) -> Reading:
    """`models/qwen3_dflash.py`: `_resolve_layer_attention`, `_dflash_layer_causal`, the decoder layer, the causal LM;
    `worker/gpu/spec_decode/eagle/eagle3_utils.py`: taps, as states *entering* a layer;
    `worker/gpu/spec_decode/utils.py`: the mask token; `dflash/speculator.py`: one query more than drafted tokens."""
    nested = getattr(config, "dflash_config", None) or {}
    entering = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    entering = entering or [tap + 1 for tap in nested.get("target_layer_ids") or []]
    kinds = getattr(config, "layer_types", None)
    any_slides = kinds is not None and "sliding_attention" in kinds
    layers = []
    for i in range(config.num_hidden_layers):
        slides = nested.get("use_swa", False)
        if kinds is not None and (any_slides or not slides):
            slides = kinds[i] == "sliding_attention"
        window = nested.get("swa_window_size", getattr(config, "sliding_window", None)) if slides else None
        assert not (slides and window is None), "vLLM raises"
        causal = getattr(config, "is_causal", None)
        causal = nested.get("causal") if causal is None else causal
        causal = bool(kinds) and kinds[i] == "sliding_attention" if causal is None else bool(causal)
        layers.append(Layer((window, FROM_SLOT) if window else None, causal))
    mask = nested.get("mask_token_id", getattr(config, "mask_token_id", None))
    assert mask is not None, "vLLM raises"
    draft_vocabulary = getattr(config, "draft_vocab_size", None) or config.vocab_size
    assert draft_vocabulary == config.vocab_size, "vLLM would want a d2t tensor"
    assert (getattr(config, "target_hidden_size", None) or config.hidden_size) == config.hidden_size
    return Reading(
        tuple(layer - 1 for layer in sorted(set(entering))),  # `interfaces.py`, `_set_aux_hidden_state_layers`
        int(mask),
        num_speculative_tokens + 1,
        tuple(layers),
        {"rope_theta": 1_000_000, **(config.rope_parameters or {"rope_type": "default"})},
        _sizes(config),
        config.rms_norm_eps,
        getattr(config, "attention_bias", False),
        1.0,
        getattr(config, "logit_scale", 1.0),
        None,
    )


def vllm_zlab(data: Mapping[str, Any], num_speculative_tokens: int) -> Reading:
    """vLLM 0.33.0, z-lab layout. `registry.py` maps the architecture; how many tokens are drafted is not read from the
    file (`config/speculative.py` raises without `num_speculative_tokens`)."""
    assert data["architectures"] == ["DFlashDraftModel"]
    assert data["model_type"] == "qwen3"
    return _vllm(Qwen3Config.from_dict(dict(data)), num_speculative_tokens)


class _Attributes:
    """Keys as attributes, nothing filled in: vLLM does not parse the nested config with `Qwen3Config`."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.__dict__.update(data)


def vllm_speculators(data: Mapping[str, Any]) -> Reading:
    """vLLM 0.33.0, speculators layout: `transformers_utils/config.py` recognises it by `speculators_config` without a
    `model_type`; `transformers_utils/configs/speculators/algos.py`, `update_dflash`, moves the keys."""
    assert "model_type" not in data
    assert data["speculators_model_type"] == "dflash"
    assert "name_or_path" in data["speculators_config"]["verifier"]
    moved = {
        "draft_vocab_size": data.get("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": data["aux_hidden_state_layer_ids"],
        "dflash_config": {
            "mask_token_id": data["mask_token_id"],
            "target_layer_ids": [layer - 1 for layer in data["aux_hidden_state_layer_ids"]],
            "causal": not data.get("sliding_window_non_causal", True),
        },
    }
    proposal = data["speculators_config"]["proposal_methods"][0]
    return _vllm(_Attributes({**data["transformer_layer_config"], **moved}), proposal["speculative_tokens"])


def speculators(data: Mapping[str, Any]) -> Reading:
    """speculators 0.9.0: `models/dflash/config.py` (keys, defaults), `core.py` (window only if a layer slides),
    `attention.py` (full layers are never causal, a window is counted from the anchor). No scales."""
    config = Qwen3Config(**data["transformer_layer_config"])
    both_ways = data.get("sliding_window_non_causal", False)
    layers = []
    for kind in config.layer_types:
        slides = kind == "sliding_attention" and config.sliding_window is not None
        layers.append(Layer((config.sliding_window, FROM_ANCHOR) if slides else None, slides and not both_ways))
    assert data["draft_vocab_size"] == config.vocab_size
    assert data.get("sample_from_anchor", False) is False
    return Reading(
        tuple(layer - 1 for layer in data["aux_hidden_state_layer_ids"]),
        data["mask_token_id"],
        data.get("block_size", 8),
        tuple(layers),
        dict(config.rope_parameters),
        _sizes(config),
        config.rms_norm_eps,
        config.attention_bias,
        1.0,
        1.0,
        None,
    )


def sglang(data: Mapping[str, Any], num_draft_tokens: int | None, *, reads_is_causal: bool = True) -> Reading:
    """SGLang 0.5.23: `speculative/dflash_utils.py`, `parse_dflash_draft_config` (nested first), `models/dflash.py`
    (layers, rope), `arg_groups/speculative_hook.py` (block: the flag, else the file, else 16),
    `speculative/dflash_worker_v2.py` (embedding scale from the target's class). Output scales are for DFlash 2 only.

    `reads_is_causal` is False for earlier releases (commit 003b23d of sgl-project/sglang, `models/dflash.py`).
    """
    config = Qwen3Config.from_dict(dict(data))
    nested = dict(getattr(config, "dflash_config", None) or {})

    def value(name: str) -> Any:
        return nested.get(name, getattr(config, name, None))

    depth, taps = value("num_target_layers"), [int(tap) for tap in value("target_layer_ids")]
    assert all(0 <= tap < depth for tap in taps), "SGLang raises"
    forced = getattr(config, "is_causal", None) if reads_is_causal else None
    layers = []
    for kind in config.layer_types:
        slides = kind == "sliding_attention"
        keys_back = int(config.sliding_window) - 1 if slides else -1
        causal = slides if forced is None else bool(forced)
        layers.append(Layer((keys_back + 1, FROM_SLOT) if slides else None, causal))
    rope = config.rope_parameters
    assert getattr(config, "partial_rotary_factor", 1.0) == 1.0
    before = [tap + 1 for tap in taps]  # `set_dflash_layers_to_capture`: states before these layers
    return Reading(
        tuple(layer - 1 for layer in before),
        value("mask_token_id"),
        num_draft_tokens or value("block_size") or 16,
        tuple(layers),
        dict(rope),
        _sizes(config),
        config.rms_norm_eps,
        bool(config.attention_bias),
        1.0,
        1.0,
        None,
    )
