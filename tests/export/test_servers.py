"""Every loader makes the same drafter of an exported config, by its own rules; where one would not, export refuses."""

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import replays

from conftest import tiny_config, tiny_drafter
from draftsmith.drafter.config import FULL, SLIDING, DrafterConfig
from draftsmith.export import speculators
from draftsmith.export.servers import SPECULATORS, ZLAB, disagreements
from draftsmith.report.card import launch_lines

LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
SHAPES: list[dict[str, Any]] = [
    {},
    {"layer_types": (SLIDING, SLIDING), "sliding_window": 9},
    {"layer_types": (FULL, SLIDING), "sliding_window": 9},
    {"layer_types": (SLIDING, FULL), "sliding_window": 3},
    {"sliding_window": 9},
    {"layer_types": (FULL,), "target_layer_ids": (1, 2, 3)},
]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": False},
    {"input_embedding_scale": 5.5},
    {"output_multiplier": 0.5},
    {"final_logit_softcapping": 30.0},
    {"rope_parameters": LINEAR, "attention_bias": True, "head_dim": 16, "rms_norm_eps": 1e-5},
]


def zlab_readings(config: DrafterConfig) -> list[replays.Reading]:
    """As each loader reads it when it is started with the lines that training prints."""
    data = json.loads(json.dumps(config.to_json("float32")))
    lines = launch_lines("TARGET", "DRAFT", config.block_size)
    drafted = json.loads(re.findall(r"'(.*)'", lines["vLLM"])[0])["num_speculative_tokens"]
    block = int(re.findall(r"--speculative-num-draft-tokens (\d+)", lines["SGLang"])[0])
    return [
        replays.reference(data),
        replays.vllm_zlab(data, drafted),
        replays.sglang(data, block),
        replays.sglang(data, None),
        replays.sglang(data, block, reads_is_causal=False),
    ]


def speculators_readings(config: DrafterConfig) -> list[replays.Reading]:
    data = json.loads(json.dumps(speculators.to_json(config, "float32", "owner/target", ["Qwen3ForCausalLM"])))
    return [replays.speculators(data), replays.vllm_speculators(data)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layout_is_refused_exactly_where_its_readers_differ(shape: dict[str, Any], variant: dict[str, Any]) -> None:
    config = tiny_config(**(shape | variant))
    if all(config.is_causal == (kind == SLIDING) for kind in config.layer_types):
        config = replace(config, is_causal=None)  # as reading such a file does
    for layout, readings in ((ZLAB, zlab_readings(config)), (SPECULATORS, speculators_readings(config))):
        agree = all(reading == replays.ours(config) for reading in readings)
        assert agree is not bool(disagreements(config, layout)), (layout, disagreements(config, layout))


def test_the_grid_holds_both_kinds() -> None:
    """Or the test above would say nothing."""
    configs = [tiny_config(**(s | v)) for s, v in itertools.product(SHAPES, VARIANTS)]
    for layout in (ZLAB, SPECULATORS):
        assert {bool(disagreements(config, layout)) for config in configs} == {True, False}


@pytest.mark.parametrize(
    "key",
    ["head_dim", "vocab_size", "rope_parameters", "num_key_value_heads", "layer_types", "rms_norm_eps", "block_size"],
)
def test_a_key_left_to_defaults_would_be_seen(key: str) -> None:
    """The replays fill in what each loader fills in, so a key that is not written makes a difference."""
    config = tiny_config(
        layer_types=(SLIDING, FULL), sliding_window=9, rms_norm_eps=1e-5, rope_parameters=LINEAR, block_size=6
    )
    data = config.to_json("float32")
    del data[key]
    data["dflash_config"].pop(key, None)
    data.pop("rope_theta") if key == "rope_parameters" else None
    try:
        readings = [replays.reference(data), replays.vllm_zlab(data, 5), replays.sglang(data, None)]
    except (AssertionError, AttributeError, TypeError):
        return  # a loader that raises is seen, too
    assert any(reading != replays.ours(config) for reading in readings)


def test_tensor_names_are_those_that_loaders_know() -> None:
    """vLLM refuses a name it does not know, SGLang drops it: neither prefix, embedding nor head. (`load_weights` in
    `models/qwen3_dflash.py`, vLLM 0.33.0, and `models/dflash.py`, SGLang 0.5.23.)"""
    known = re.compile(
        r"fc\.weight|hidden_norm\.weight|norm\.weight|layers\.\d+\.((input|post_attention)_layernorm\.weight|"
        r"self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.weight)"
    )
    for bias in (False, True):
        names = list(tiny_drafter(attention_bias=bias).state_dict())
        assert all(known.fullmatch(name) for name in names)
        assert len(names) == 3 + 2 * (11 + 4 * bias)
