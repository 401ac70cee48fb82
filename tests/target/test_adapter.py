"""A LoRA adapter is merged at load: the target then is another one, for features, fingerprints and the record."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from conftest import run_training
from draftsmith import cli, embedded
from draftsmith.config import Config
from draftsmith.errors import InputError
from draftsmith.report.session import load_pair
from draftsmith.target.load import Target, TargetSpec, load_target

CPU = torch.device("cpu")
TAPS = (0, 2, 3)


def qwen3(folder: Path, layers: int = 5) -> Path:
    """A random target with the embedded tokenizer."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded.TARGET).save_pretrained(folder)
    return folder


def lora(base: Path, folder: Path, *, trained: bool = True, layers: list[int] | None = None) -> Path:
    """An adapter for it; an untrained one adds nothing."""
    torch.manual_seed(2)
    settings = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=not trained, task_type="CAUSAL_LM",
        layers_to_transform=layers,
    )  # fmt: skip
    get_peft_model(Qwen3ForCausalLM.from_pretrained(base), settings).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora(base, tmp_path_factory.mktemp("adapter"))


def load(base: Path, adapter: Path | None = None) -> Target:
    return load_target(TargetSpec(str(base), adapter=str(adapter) if adapter else None), TAPS, CPU)


def test_features_are_those_of_the_adapted_model(base: Path, adapter: Path) -> None:
    """Against PEFT's own forward, which adds the low-rank part without merging it."""
    ids = torch.arange(100, 130)
    (merged,) = load(base, adapter).features([ids])
    (plain,) = load(base).features([ids])
    unmerged = PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(base), adapter).eval()
    with torch.no_grad():
        states = unmerged(input_ids=ids[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[tap + 1][0] for tap in TAPS], -1)
    assert (merged - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (merged - plain).abs().max() > 1e-2 * expected.abs().max()


def test_nothing_of_peft_stays_in_the_model(base: Path, adapter: Path) -> None:
    target = load(base, adapter)
    assert type(target.model).__name__ == "Qwen3ForCausalLM"
    assert not any("lora" in name for name, _ in target.model.named_parameters())
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_the_fingerprint_is_another_one(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert load(base, adapter).fingerprint == load(base, adapter).fingerprint != load(base).fingerprint
    assert load(base, lora(base, tmp_path / "untrained", trained=False)).fingerprint == load(base).fingerprint


def test_without_peft_the_remedy_is_named(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"needs peft, which is not installed: pip install 'draftsmith\[lora\]'"):
        load(base, adapter)
    load(base)


def test_adapters_that_do_not_belong_are_refused(base: Path, tmp_path: Path) -> None:
    deeper = lora(qwen3(tmp_path / "deeper", layers=7), tmp_path / "of-deeper")
    shallower = lora(qwen3(tmp_path / "shallower", layers=3), tmp_path / "of-shallower")
    for other in (deeper, shallower):
        with pytest.raises(InputError, match="was made for another model"):
            load(base, other)
    settings = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    get_peft_model(Qwen3ForCausalLM.from_pretrained(base), settings).save_pretrained(tmp_path / "prompt")
    with pytest.raises(InputError, match="is a PROMPT_TUNING adapter; only LoRA"):
        load(base, tmp_path / "prompt")


def test_an_adapter_that_is_not_there_is_one_line(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (str(tmp_path / "nowhere"), "nobody/nothing"):
        with pytest.raises(InputError, match=r"target\.adapter .* cannot be merged") as caught:
            load_target(TargetSpec(str(base), adapter=name), TAPS, CPU)
        assert "\n" not in str(caught.value)


def test_training_records_it_and_eval_asks_for_it(
    demo_config: Callable[..., Config], base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = {"model": str(base), "adapter": str(adapter)}
    result, quiet, runs = run_training(demo_config(target=target, train__steps=1, train__rows_per_step=1))
    draft = result.folder / "draft"
    provenance = json.loads((draft / "draftsmith.json").read_text())
    assert provenance["target_adapter"] == str(adapter)
    assert provenance["target_fingerprint"] == load(base, adapter).fingerprint
    assert f"adapter: {adapter} (set in the config; merged into the target)" in quiet.lines
    assert next(iter(runs[0].targets.values())).target.spec.adapter == str(adapter)

    load_pair(TargetSpec(str(base), adapter=str(adapter)), draft, CPU)
    assert "warning" not in capsys.readouterr().out
    load_pair(TargetSpec(str(base)), draft, CPU)
    assert "was trained for another target" in capsys.readouterr().out

    (tmp_path / "p.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    evaluate = ["eval", "--target", str(base), "--draft", str(draft), "--prompts", str(tmp_path / "p.jsonl")]
    assert cli.main([*evaluate, "--max-new-tokens", "4", "--adapter", str(adapter)]) == 0
    assert "warning" not in capsys.readouterr().out


def test_the_revision_is_that_of_config_weights_and_tokenizer(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []
    for factory in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        original = factory.from_pretrained

        def spy(
            path: str, *, revision: Any = None, _original: Any = original, _name: str = factory.__name__, **more: Any
        ) -> Any:
            asked.append((_name, revision))
            return _original(path, **more)

        monkeypatch.setattr(factory, "from_pretrained", spy)
    spec = TargetSpec(str(base), "v2")
    spec.config()
    spec.skeleton()
    load_target(spec, TAPS, CPU)
    ours = {name for name, revision in asked if revision == "v2"}
    assert ours == {"AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"}


def test_a_folder_without_tokenizer_files_has_no_tokenizer(base: Path, tmp_path: Path) -> None:
    """transformers would make up an empty one, and a mask token that means something."""
    Qwen3ForCausalLM.from_pretrained(base).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no tokenizer files"):
        TargetSpec(str(tmp_path)).tokenizer()
