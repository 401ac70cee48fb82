"""Keys of a `config.json` that one loader reads and another does not, so that one folder would be two drafters.

Read from dflash 0.1.0 (`model.py`), vLLM 0.33.0 (`models/qwen3_dflash.py`, `spec_decode/eagle/eagle3_utils.py`),
SGLang 0.5.23 (`models/dflash.py`, `speculative/dflash_utils.py`) and transformers' `Qwen3Config`. `docs/checkpoints.md`
has the table for people.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import InputError

# Rotary kinds whose frequencies do not change with the length of the sequence.
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
_SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Trap:
    """A key, at the top or in `dflash_config`; the values that change nothing; why any other is refused."""

    key: str
    harmless: tuple[Any, ...]
    reason: str


TRAPS = (
    Trap("causal", (), "vLLM lets it override every layer, the others ignore it; use layer_types"),
    Trap("use_swa", (False,), "only vLLM reads it; use layer_types"),
    Trap("attention_sink_bias", (False,), "attention sinks are not supported, and the reference ignores them"),
    Trap("add_swa_attention_sink_bias", (False,), "attention sinks are not supported, and only vLLM reads the key"),
    Trap("attention_value_scale", (1.0,), "the reference ignores it"),
    Trap("use_gemma_norm", (False,), "only SGLang reads it; store 1 + w"),
    Trap("is_neox_style", (True,), "the reference always rotates halves"),
    Trap("rope_is_neox_style", (True,), "only SGLang reads it"),
    Trap("partial_rotary_factor", (1.0,), "a partial rotation is read by some loaders and ignored by others"),
    Trap("rope_dim", (), "only SGLang reads it"),
    Trap("use_aux_hidden_state", (True,), "a drafter without features is no DFlash drafter"),
    Trap("sample_from_anchor", (False,), "its slots predict one token further; such a drafter is not supported"),
    Trap("logit_scale", (1.0,), "only vLLM reads it; use dflash_config.output_multiplier"),
    Trap("hidden_act", ("silu",), "drafters use silu"),
    Trap("projector_type", (), "a Domino head is not supported"),
    Trap("conv_kernel_size", (0,), "DFlash 2 is not supported"),
    Trap("selector_rank", (0,), "DFlash 2 is not supported"),
    Trap("quantization_config", (), "quantised drafters are not supported"),
)
# Written twice, they must agree: which of the two wins differs between loaders.
WRITTEN_TWICE = ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers")


def check_traps(data: Mapping[str, Any]) -> None:
    """Refuses a z-lab `config.json` that the loaders would read as different drafters.

    Raises:
        InputError: names the key, its value and the loader.
    """
    nested = data.get("dflash_config") or {}
    for trap in TRAPS:
        for place, where in ((nested, "dflash_config."), (data, "")):
            value = place.get(trap.key)
            if value is not None and value not in trap.harmless:
                raise InputError(f"{where}{trap.key} is {value}: {trap.reason}")
    for key in WRITTEN_TWICE:
        if key in nested and data.get(key) not in (None, nested[key]):
            raise InputError(
                f"{key} is {data[key]} at the top and {nested[key]} in dflash_config; loaders differ in which they take"
            )
    _check_equal(data, nested)
    _check_layers(data)
    _check_rope(data)


def _check_equal(data: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    taps = nested.get("target_layer_ids", data.get("target_layer_ids")) or []
    expected = {
        "draft_vocab_size": (data.get("vocab_size"), "a drafter with a vocabulary of its own is not supported"),
        "target_hidden_size": (data.get("hidden_size"), "the drafter must be as wide as the target"),
        "eagle_aux_hidden_state_layer_ids": ([tap + 1 for tap in taps], "vLLM takes it instead of target_layer_ids"),
    }
    for key, (value, reason) in expected.items():
        if data.get(key) is not None and data[key] != value:
            raise InputError(f"{key} is {data[key]}, expected {value}: {reason}")
    window = nested.get("swa_window_size")
    if window is not None and window != data.get("sliding_window"):
        raise InputError(
            f"dflash_config.swa_window_size is {window}, sliding_window {data.get('sliding_window')}: vLLM reads the "
            "first, the others the second"
        )


def _check_layers(data: Mapping[str, Any]) -> None:
    kinds, sliding = data.get("layer_types"), data.get("use_sliding_window")
    if not kinds and sliding:
        raise InputError("layer_types is missing while use_sliding_window is true; transformers would make kinds up")
    if kinds and _SLIDING in kinds and not sliding:
        raise InputError(
            "use_sliding_window must be true for a sliding layer: transformers drops the window without it"
        )
    if kinds and len(kinds) != data.get("num_hidden_layers"):
        raise InputError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {data.get('num_hidden_layers')}")


def _check_rope(data: Mapping[str, Any]) -> None:
    new, old = data.get("rope_parameters") or {}, data.get("rope_scaling") or {}
    for rope, name in ((new, "rope_parameters"), (old, "rope_scaling")):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in FIXED_ROPE:
            raise InputError(f"{name}.rope_type is {kind}: expected one of {', '.join(FIXED_ROPE)}")
        for key, harmless in (("partial_rotary_factor", 1.0), ("rope_dim", None), (_SLIDING, None)):
            if rope.get(key, harmless) != harmless:
                raise InputError(f"{name}.{key} is {rope[key]}: loaders read it differently")
    theta = data.get("rope_theta")
    if new and theta is not None and new.get("rope_theta", theta) != theta:
        raise InputError(f"rope_theta is {theta}, rope_parameters.rope_theta {new['rope_theta']}: write one value")
    if new and old and any(new.get(key) != value for key, value in old.items() if key != "rope_theta"):
        raise InputError(f"rope_scaling is {old}, rope_parameters {new}: write the same in both")
