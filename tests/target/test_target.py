"""Features of any architecture: the layers' own outputs, the same however documents are grouped and threads run."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from conftest import tiny_qwen3
from draftsmith import embedded
from draftsmith.decode.probe import probe_target
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.init import init_from_target
from draftsmith.drafter.model import Drafter
from draftsmith.errors import InputError
from draftsmith.pipeline.prepare import choose_taps
from draftsmith.target.capture import TapCapture, check_taps, decoder_layers, default_taps
from draftsmith.target.load import Target, TargetSpec, _groups_by_length, fingerprint, frozen_weights, load_target


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=256)
    )  # fmt: skip


def gemma() -> Any:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=8,
                         max_position_embeddings=256)
    )  # fmt: skip


def qwen3_5() -> Any:
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5,
                          num_attention_heads=4, num_key_value_heads=2, head_dim=8, linear_num_key_heads=2,
                          linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                          max_position_embeddings=256)
    )  # fmt: skip


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=5, n_head=4, n_positions=256))


FAMILIES = [tiny_qwen3, llama, gemma, qwen3_5, gpt2]


def build(make: Any) -> Target:
    torch.manual_seed(0)
    model = make().eval()
    return Target(
        spec=TargetSpec("tiny"), model=model, config=model.config.get_text_config(),
        tokenizer=AutoTokenizer.from_pretrained(embedded.TARGET),
        capture=TapCapture(decoder_layers(model, 5), (0, 2, 3)),
        embedding_VH=model.get_input_embeddings().weight.detach(),
        head_VH=model.get_output_embeddings().weight.detach(), stop_ids=(), fingerprint="",
    )  # fmt: skip


def documents() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(0, 64, (length,), generator=g) for length in (30, 7, 29, 1, 28, 8, 40)]


@pytest.mark.parametrize("make", FAMILIES, ids=lambda f: f.__name__)
def test_features_are_the_outputs_of_the_tapped_layers(make: Any) -> None:
    """Tap k is `hidden_states[k + 1]`, and padding or company changes nothing."""
    target = build(make)
    got = target.features(documents())
    for ids, hidden_TF in zip(documents(), got, strict=True):
        with torch.no_grad():
            states = target.model(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.cat([states[1][0], states[3][0], states[4][0]], -1)
        assert hidden_TF.shape == (len(ids), 96)
        assert (hidden_TF - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("make", FAMILIES, ids=lambda f: f.__name__)
def test_the_forward_stops_after_the_last_tap(make: Any) -> None:
    target = build(make)
    ran = []
    decoder_layers(target.model, 5)[4].register_forward_hook(lambda *a: ran.append("last layer"))
    target.features(documents())
    assert ran == []


def test_threads_that_share_a_model_keep_their_features_apart() -> None:
    target = build(tiny_qwen3)
    expected = [target.features([ids])[0] for ids in documents()]
    wrong = []

    def work(number: int) -> None:
        for _ in range(30):
            if not torch.equal(target.features([documents()[number]])[0], expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_groups_hold_every_document_once_and_little_padding() -> None:
    lengths = [5, 100, 98, 97, 3, 60, 61, 1]
    groups = _groups_by_length(lengths)
    assert sorted(i for group in groups for i in group) == list(range(8))
    padded = sum(max(lengths[i] for i in group) * len(group) for group in groups)
    assert padded <= 1.15 * sum(lengths) + 1e-9
    assert len(groups) < 8


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(2, (0,)), (4, (0, 1, 2)), (5, (1, 2)), (10, (1, 2, 4, 6, 7)), (28, (1, 7, 13, 19, 25)), (36, (1, 9, 17, 25, 33))],
)
def test_default_taps(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps
    assert choose_taps(None, layers).value == taps


def test_repeating_taps_are_said() -> None:
    assert "2 of 5" in choose_taps(None, 5).reason


@pytest.mark.parametrize("taps", [[], [9], [-1, 2], [3, 2], [2, 2], [0, 10]])
def test_impossible_taps_are_refused(taps: list[int]) -> None:
    with pytest.raises(InputError, match=r"drafter\.taps"):
        check_taps(taps, 10)


def test_a_single_layer_is_refused() -> None:
    with pytest.raises(InputError, match="at least one layer"):
        default_taps(1)


def shape_of(config: Any, layers: int = 2) -> DrafterConfig:
    from conftest import tiny_config

    return tiny_config(
        head_dim=getattr(config, "head_dim", None) or 8,
        num_target_layers=5,
        target_layer_ids=(0, 2, 3),
        layer_types=("full_attention",) * layers,
    )


@pytest.mark.parametrize("make", [tiny_qwen3, llama, gemma, qwen3_5], ids=lambda f: f.__name__)
def test_start_from_the_target_takes_the_norms_effect(make: Any) -> None:
    """Whether a family stores w or 1 + w, the drafter's norm does what the target's does."""
    target = build(make)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    drafter = Drafter(shape_of(target.config))
    decision = init_from_target(drafter, decoder_layers(target.model, 5), target.model.model.norm, 0)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(drafter.norm(x), target.model.model.norm(x), atol=1e-4)
    source = decoder_layers(target.model, 5)[3]
    assert torch.allclose(drafter.hidden_norm(x), source.input_layernorm(x), atol=1e-4)
    assert torch.equal(drafter.stack[0].mlp.gate_proj.weight, source.mlp.gate_proj.weight)
    assert "copied" in decision.reason


def test_start_from_the_target_passes_the_last_tap_through() -> None:
    drafter = Drafter(shape_of(tiny_qwen3().config))
    init_from_target(drafter, decoder_layers(tiny_qwen3(), 5), None, 0)
    features = torch.randn(3, 96)
    assert torch.equal(drafter.fc(features), features[:, 64:])


def test_fingerprints_tell_models_and_templates_apart() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.TARGET)
    one, other = tiny_qwen3(), tiny_qwen3()
    assert fingerprint(one, tokenizer) == fingerprint(other, tokenizer)
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[0, 0] += 1
    assert fingerprint(one, tokenizer) != fingerprint(other, tokenizer)
    before = fingerprint(one, tokenizer)
    tokenizer.chat_template += " "
    assert fingerprint(one, tokenizer) != before


def test_rotary_kinds_that_depend_on_the_length_are_not_taken_over() -> None:
    """A table of another length would have other frequencies: trained at one length, served at another."""
    from transformers import Qwen3Config

    from draftsmith.pipeline.prepare import _rope

    def taken(**rope: object) -> object:
        return _rope(Qwen3Config(rope_parameters={"rope_theta": 5000.0, **rope}))["rope_type"]

    assert taken(rope_type="dynamic", factor=2.0) == "default"
    assert taken(rope_type="yarn", factor=2.0) == "yarn"
    assert taken(rope_type="default") == "default"


def test_a_head_in_whole_numbers_is_refused() -> None:
    """A wrapped quantised head is unpacked; bare integers are not weights that a drafter could use."""
    target = build(llama)
    target.model.lm_head.weight = torch.nn.Parameter(target.head_VH.to(torch.int8), requires_grad=False)
    with pytest.raises(InputError, match=r"quantised to torch\.int8"):
        frozen_weights(target.spec, target.model)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The embedded target in a folder that may be damaged."""
    return Path(shutil.copytree(embedded.TARGET, tmp_path / "copy"))


def refused(folder: Path, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_target(TargetSpec(str(folder)), (1,), torch.device("cpu"))


def test_a_weight_that_is_missing_is_not_drawn_at_random(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    del weights[name]
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    refused(copied, rf"1 of its weights are not in its files \({name}\)")


@pytest.mark.parametrize("kept", [0, 5000])
def test_a_cut_file_is_one_line(kept: int, copied: Path) -> None:
    weights = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(weights[:kept])
    refused(copied, "cannot be loaded: ")


@pytest.mark.parametrize(
    "changes", [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"dtype": "foo"}, {"rope_parameters": 7}]
)
def test_an_impossible_config_is_one_line(changes: dict[str, Any], copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | changes))
    refused(copied, "cannot be loaded: ")


@pytest.mark.parametrize(
    ("content", "said"), [("{", "generation_config.json cannot be read"), ('{"eos_token_id": "x"}', "is 'x', expected")]
)
def test_stop_ids_are_not_lost(content: str, said: str, copied: Path) -> None:
    (copied / "generation_config.json").write_text(content)
    refused(copied, said)


def test_damaged_weights_are_said_and_not_the_cache(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    next(w for name, w in weights.items() if "down_proj" in name).fill_(float("nan"))
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="computes NaN or infinite logits"):
        probe_target(load_target(TargetSpec(str(copied)), (1,), torch.device("cpu")), trees=False)
