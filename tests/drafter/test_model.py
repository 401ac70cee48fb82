"""The drafter's own backwards against autograd's, its rotation against transformers', and its checkpoint."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from conftest import tiny_config, tiny_drafter
from draftsmith.drafter.checkpoint import load_drafter, save_drafter
from draftsmith.drafter.config import FULL, SLIDING, DrafterConfig
from draftsmith.drafter.model import Drafter, RMSNorm, RotaryTable, rotate
from draftsmith.errors import InputError


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())


@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 16)])
def test_the_norm_and_its_gradients_are_the_librarys(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    norm = RMSNorm(16, 1e-2)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(16, generator=g) + 0.5)
    x = torch.randn(shape, generator=g).transpose(0, -2).requires_grad_()  # a gradient that is not contiguous, too
    upstream = torch.randn(shape, generator=g).transpose(0, -2)
    ours, expected = norm(x), F.rms_norm(x, (16,), norm.weight, 1e-2)
    assert close(ours, expected)
    leaves = (x, norm.weight)
    pairs = zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    )
    assert all(close(a, b) for a, b in pairs)
    with torch.no_grad():
        assert close(norm(x), expected)


def test_the_rotation_and_its_gradient_are_transformers() -> None:
    rotary = RotaryTable(tiny_config(), 64, torch.device("cpu"))
    positions = torch.tensor([3, 0, 40, 63, 7])
    cos, sin = rotary.at(positions)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 5, 8, generator=g).requires_grad_()
    upstream = torch.randn(4, 5, 8, generator=g)
    expected = apply_rotary_pos_emb(x[None], x[None], cos[None], sin[None])[0][0]
    assert close(rotate(x, (cos, sin)), expected)
    ours = torch.autograd.grad(rotate(x, (cos, sin)), x, upstream)[0]
    assert close(ours, torch.autograd.grad(expected, x, upstream)[0])
    with torch.no_grad():
        assert close(rotate(x, (cos, sin)), expected)


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


def saved(tmp_path: Path) -> Path:
    save_drafter(tmp_path / "draft", tiny_drafter(), dtype=torch.float32, provenance={}, card="")
    return tmp_path / "draft"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"is_causal": False}, "is_causal"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 2], "block_size": 4}}, "mask_token_id is missing"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window must be given"),
        ({"layer_types": ["full_attention", "chunked"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 63, "block_size": 1}}, "block_size"),
    ],
)
def test_a_config_that_loaders_would_read_differently_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = saved(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        load_drafter(path.parent, torch.device("cpu"))


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


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for broken, message in [
        ({k: v for k, v in tensors.items() if k != "norm.weight"}, "missing"),
        (tensors | {"lm_head.weight": torch.zeros(1)}, "unknown"),
        (tensors | {"norm.weight": torch.zeros(3)}, "norm.weight is"),
    ]:
        save_file(broken, folder / "model.safetensors")
        with pytest.raises(InputError, match=message):
            load_drafter(folder, torch.device("cpu"))
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(InputError, match="cannot be read"):
        load_drafter(folder, torch.device("cpu"))


def test_a_published_layout_is_understood() -> None:
    """Block size at the top only, rope as `rope_theta`, no layer types: as older published drafters have it."""
    written = tiny_config().to_json("bfloat16")
    for key in ("rope_parameters", "layer_types"):
        del written[key]
    del written["dflash_config"]["block_size"]
    assert DrafterConfig.from_json(written, Path("config.json")) == tiny_config()
