"""Drafter folders: what is written is read back, and what is malformed is one line that names the culprit."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import tiny_config, tiny_drafter
from draftsmith.drafter.checkpoint import load_drafter, save_drafter
from draftsmith.drafter.config import FULL, SLIDING, DrafterConfig
from draftsmith.drafter.model import Drafter, RotaryTable
from draftsmith.errors import InputError


def test_a_folder_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    drafter = tiny_drafter(layer_types=(FULL, SLIDING), sliding_window=7)
    save_drafter(tmp_path / "draft", drafter, dtype=torch.float32, provenance={}, card="")
    again = load_drafter(tmp_path / "draft", torch.device("cpu"))
    assert again.config == drafter.config
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), drafter.state_dict().values(), strict=True)
    )


def test_stored_in_bf16_computed_in_fp32(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    save_drafter(tmp_path / "draft", drafter, dtype=torch.bfloat16, provenance={}, card="")
    assert {t.dtype for t in load_file(tmp_path / "draft" / "model.safetensors").values()} == {torch.bfloat16}
    again = load_drafter(tmp_path / "draft", torch.device("cpu"))
    assert again.fc.weight.dtype == torch.float32
    assert torch.equal(again.fc.weight, drafter.fc.weight.bfloat16().float())


def test_saving_again_replaces_the_folder(tmp_path: Path) -> None:
    for seed in (0, 1):
        save_drafter(tmp_path / "draft", tiny_drafter(seed), dtype=torch.float32, provenance={"n": seed}, card="")
    assert torch.equal(load_drafter(tmp_path / "draft", torch.device("cpu")).fc.weight, tiny_drafter(1).fc.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def saved(tmp_path: Path, **changes: Any) -> Path:
    save_drafter(tmp_path / "draft", tiny_drafter(**changes), dtype=torch.float32, provenance={}, card="")
    return tmp_path / "draft"


def edited(folder: Path, top: dict[str, Any], nested: dict[str, Any] | None = None) -> Path:
    """The folder with keys of its config changed; a value of None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | top
    config["dflash_config"] = config.get("dflash_config", {}) | (nested or {})
    config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if v is not None}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "high_freq_factor": 4.0}
SLIDES = {"layer_types": ["full_attention", "sliding_attention"]}
MALFORMED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, {}, "architectures is ['LlamaForCausalLM'], expected"),
    ({"hidden_size": None}, {}, "hidden_size is missing"),
    ({"head_dim": None}, {}, "head_dim is missing"),
    ({}, {"mask_token_id": None}, "mask_token_id is missing"),
    ({}, {"mask_token_id": 64}, "mask_token_id is 64, outside the vocabulary of 64"),
    ({"num_key_value_heads": 3}, {}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"block_size": 1}, {"block_size": 1}, "block_size is 1: a block needs the anchor and one slot"),
    ({"block_size": 8}, {}, "block_size is 8 at the top and 4 in dflash_config"),
    (
        {"num_target_layers": 3},
        {},
        "target_layer_ids is [0, 1, 2]: expected ascending layers within 0..1 of the target's",
    ),
    ({}, {"target_layer_ids": [0, 1, 4]}, "target_layer_ids is [0, 1, 4]: expected ascending layers within 0..3 of"),
    ({}, {"target_layer_ids": [2, 1, 0]}, "target_layer_ids is [2, 1, 0]: expected ascending"),
    ({}, {"target_layer_ids": [-1, 1, 2]}, "target_layer_ids is [-1, 1, 2]"),
    ({"target_layer_ids": [1, 2, 3]}, {}, "target_layer_ids is [1, 2, 3] at the top and [0, 1, 2] in dflash_config"),
    ({"layer_types": ["full_attention", "chunked"]}, {}, "layer_types must be a list of"),
    ({"layer_types": ["full_attention"]}, {}, "layer_types has 1 entries, num_hidden_layers is 2"),
    (SLIDES, {}, "use_sliding_window must be true for a sliding layer"),
    (SLIDES | {"use_sliding_window": True}, {}, "sliding_window must be given"),
    *[
        (
            SLIDES | {"use_sliding_window": True, "sliding_window": n},
            {},
            "sliding_window must be given, 1 to 2147483647",
        )
        for n in (0, -3, 10**30)
    ],
    ({"rope_parameters": {**LLAMA3, "low_freq_factor": True}}, {}, "rope_parameters.low_freq_factor is True: expected"),
    ({"use_sliding_window": True, "layer_types": None}, {}, "layer_types is missing while use_sliding_window is true"),
    ({}, {"causal": True}, "dflash_config.causal is True: vLLM lets it override every layer"),
    ({}, {"use_swa": True}, "dflash_config.use_swa is True: only vLLM reads it"),
    ({}, {"swa_window_size": 9}, "dflash_config.swa_window_size is 9, sliding_window None"),
    ({}, {"attention_sink_bias": True}, "dflash_config.attention_sink_bias is True"),
    ({"use_gemma_norm": True}, {}, "use_gemma_norm is True: only SGLang reads it; store 1 + w"),
    ({"is_neox_style": False}, {}, "is_neox_style is False"),
    ({"logit_scale": 0.5}, {}, "logit_scale is 0.5: only vLLM reads it"),
    ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor is 0.5"),
    ({"rope_theta": 5.0}, {}, "rope_theta is 5.0, rope_parameters.rope_theta 10000.0"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "rope_type is dynamic"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {}, "rope_scaling is {'rope_type': 'linear'"),
    ({"hidden_act": "gelu"}, {}, "hidden_act is gelu"),
    ({"draft_vocab_size": 32}, {}, "draft_vocab_size is 32, expected 64"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, {}, "expected [1, 2, 3]: vLLM takes it instead"),
    ({"quantization_config": {"bits": 4}}, {}, "quantised drafters are not supported"),
    ({}, {"sample_from_anchor": True}, "dflash_config.sample_from_anchor is True"),
    ({}, {"projector_type": "domino"}, "a Domino head is not supported"),
    ({}, {"selector_rank": 64}, "DFlash 2 is not supported"),
]


@pytest.mark.parametrize(("top", "nested", "message"), MALFORMED, ids=[m[:50] for _, _, m in MALFORMED])
def test_a_config_that_loaders_would_read_differently_is_refused(
    tmp_path: Path, top: dict[str, Any], nested: dict[str, Any], message: str
) -> None:
    """In one line that starts with the file and says which key is wrong."""
    folder = edited(saved(tmp_path), top, nested)
    with pytest.raises(InputError) as caught:
        load_drafter(folder, CPU)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{folder}/config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kinds", "is_causal", "kept"),
    [
        ((FULL, FULL), True, True),
        ((FULL, FULL), False, None),
        ((SLIDING, SLIDING), True, None),
        ((SLIDING, SLIDING), False, False),
        ((FULL, SLIDING), True, True),
        ((FULL, SLIDING), False, False),
    ],
)
def test_causality_that_the_layer_types_do_not_say_is_kept(
    tmp_path: Path, kinds: tuple[str, ...], is_causal: bool, kept: bool | None
) -> None:
    folder = edited(saved(tmp_path, layer_types=kinds, sliding_window=7), {"is_causal": is_causal})
    config = load_drafter(folder, CPU).config
    assert config.is_causal is kept
    assert [config.causal(i) for i in range(2)] == [is_causal, is_causal]
    assert ("is_causal" in config.to_json("float32")) is (kept is not None)


def spoil(name: str, value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name].view(-1)[-1] = value
        return tensors

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "norm.weight"}, "tensors 1 missing (norm.weight)"),
        (lambda t: t | {"lm_head.weight": torch.zeros(1)}, "tensors 1 unknown (lm_head.weight)"),
        (lambda t: t | {"norm.weight": torch.zeros(3)}, "norm.weight is (3,), config.json says (32,)"),
        (lambda t: t | {"fc.weight": torch.zeros(32, 64)}, "fc.weight is (32, 64), config.json says (32, 96)"),
        (spoil("layers.1.mlp.up_proj.weight", math.nan), "layers.1.mlp.up_proj.weight holds NaN or infinite values"),
        (spoil("fc.weight", math.inf), "fc.weight holds NaN or infinite values"),
        (lambda t: t | {"fc.weight": torch.zeros(32, 96, dtype=torch.int8)}, "fc.weight is stored as torch.int8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = saved(tmp_path) / "model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(InputError) as caught:
        load_drafter(path.parent, CPU)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"^\S+/model\.safetensors is damaged or cut short \(.+\); copy it again$"):
        load_drafter(path.parent, CPU)


def test_a_folder_without_its_tensors_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    path.unlink()
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read"):
        load_drafter(path.parent, CPU)
    path.with_name("model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="holds its tensors in several files"):
        load_drafter(path.parent, CPU)


@pytest.mark.parametrize(
    "content", [b"[1]", b"3", b"\xff\xfe", b"{", b'{"architectures": ["DFlashDraftModel"], "dflash_config": [1]}']
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = saved(tmp_path) / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json"):
        DrafterConfig.read(path.parent)


@pytest.mark.parametrize(
    "key", ["hidden_size", "rms_norm_eps", "layer_types", "num_key_value_heads", "rope_parameters"]
)
@pytest.mark.parametrize("value", ["x", {"a": 1}, [[]], 0])
def test_a_value_of_the_wrong_type_is_one_line(tmp_path: Path, key: str, value: Any) -> None:
    path = saved(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with contextlib.suppress(InputError):
        Drafter(DrafterConfig.read(path.parent))


@pytest.mark.parametrize("factor", [None, "x", [2.0], 0, math.inf])
def test_a_rotation_without_its_factor_is_refused(factor: Any) -> None:
    with pytest.raises(InputError, match=r"rope_parameters.factor is .*: expected a positive number"):
        tiny_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": factor})


@pytest.mark.parametrize("original", ["x", [2.0]])
def test_a_rotation_that_cannot_be_computed_is_one_line(original: Any) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": original}
    with pytest.raises(InputError, match=r"rope_parameters .* cannot be used: .*; mend its config.json"):
        RotaryTable(tiny_config(rope_parameters=yarn), 8, CPU)


def test_a_published_layout_is_understood() -> None:
    """Block size at the top only, rope as `rope_theta`, no layer types: as older published drafters have it."""
    written = tiny_config().to_json("bfloat16")
    for key in ("rope_parameters", "layer_types"):
        del written[key]
    del written["dflash_config"]["block_size"]
    assert DrafterConfig.from_json(written, Path("config.json")) == tiny_config()
