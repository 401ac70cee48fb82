"""`draftsmith export` and `import`: layouts both ways, bit for bit, and what is refused with its reason."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from conftest import demo_shape, tiny_drafter
from draftsmith import cli, embedded
from draftsmith.data.conversations import read_prompts
from draftsmith.data.template import Renderer
from draftsmith.decode.speculate import speculative_generate
from draftsmith.drafter.checkpoint import load_drafter, save_drafter, write_folder
from draftsmith.drafter.config import FULL, SLIDING, DrafterConfig
from draftsmith.drafter.init import random_init
from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError, InputError, explained
from draftsmith.export.convert import export_drafter, import_drafter
from draftsmith.report.session import load_pair
from draftsmith.target.load import Target, TargetSpec
from faults import largest_file, small_disk

CPU = torch.device("cpu")
DEMO = TargetSpec("demo")
ZLAB_FILES = {"config.json", "model.safetensors", "draftsmith.json", "README.md"}


@pytest.fixture
def draft(tmp_path: Path, demo_target: Target) -> Path:
    """A drafter for the embedded target, in bf16, as a run leaves it."""
    return written(tmp_path / "draft", demo_target)


def written(folder: Path, target: Target, **changes: Any) -> Path:
    from dataclasses import replace

    drafter = Drafter(replace(demo_shape(target), **changes))
    random_init(drafter, 3)
    provenance = {"target": "demo", "target_fingerprint": target.fingerprint}
    save_drafter(folder, drafter, dtype=torch.bfloat16, provenance=provenance, card="# card\n")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def config_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return data


def rewrite(folder: Path, **changes: Any) -> Path:
    """Keys of the config changed; None removes one."""
    data = {key: value for key, value in (config_of(folder) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def test_there_and_back_is_bit_identical(draft: Path, tmp_path: Path) -> None:
    export_drafter(str(draft), "speculators", tmp_path / "there")
    export_drafter(str(tmp_path / "there"), "zlab", tmp_path / "exported")
    import_drafter(str(tmp_path / "there"), tmp_path / "imported")
    assert set(files(draft)) == ZLAB_FILES
    assert files(tmp_path / "exported") == files(draft)
    assert files(tmp_path / "imported") == files(draft)


def test_the_speculators_layout_says_what_it_must(draft: Path, tmp_path: Path, demo_target: Target) -> None:
    lines = export_drafter(str(draft), "speculators", tmp_path / "there")
    data, zlab = config_of(tmp_path / "there"), config_of(draft)
    assert data["aux_hidden_state_layer_ids"] == [tap + 1 for tap in zlab["dflash_config"]["target_layer_ids"]]
    assert data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == zlab["block_size"] - 1
    assert data["speculators_config"]["verifier"] == {
        "name_or_path": str(embedded.TARGET),
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert data["sliding_window_non_causal"] is True
    tensors, target = (
        load_file(tmp_path / "there" / "model.safetensors"),
        load_file(embedded.TARGET / "model.safetensors"),
    )
    embedding = target["model.embed_tokens.weight"]
    assert torch.equal(tensors.pop("embed_tokens.weight"), embedding)
    assert torch.equal(tensors.pop("lm_head.weight"), target.get("lm_head.weight", embedding))
    assert tensors.keys() == load_file(draft / "model.safetensors").keys()
    assert lines[-2:] == [
        "read alike by speculators 0.9.0, vLLM 0.33.0",
        f"block size {zlab['block_size']}: vLLM's num_speculative_tokens is {zlab['block_size'] - 1}",
    ]


@pytest.mark.parametrize(
    ("changes", "layout", "reason"),
    [
        ({"layer_types": (FULL, SLIDING), "sliding_window": 9}, "speculators", "a sliding window is counted from"),
        ({"layer_types": (SLIDING,), "sliding_window": 9}, "speculators", "a sliding window is counted from"),
        ({"is_causal": True}, "zlab", "is_causal True overrides layer_types"),
        ({"is_causal": True}, "speculators", "is_causal True overrides layer_types"),
        ({"input_embedding_scale": 2.0}, "zlab", "input_embedding_scale 2.0 is ignored by vLLM 0.33.0"),
        ({"output_multiplier": 0.5}, "zlab", "output_multiplier 0.5 is ignored by vLLM 0.33.0"),
        ({"final_logit_softcapping": 30.0}, "speculators", "final_logit_softcapping 30.0 is ignored by vLLM 0.33.0"),
    ],
)
def test_what_readers_would_not_read_alike_is_refused(
    tmp_path: Path, demo_target: Target, changes: dict[str, Any], layout: str, reason: str
) -> None:
    """And still loads here."""
    folder = written(tmp_path / "draft", demo_target, **changes)
    with pytest.raises(InputError) as caught:
        export_drafter(str(folder), layout, tmp_path / "out")
    assert str(caught.value).startswith(f"{folder} cannot be exported to {layout}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    lines = import_drafter(str(folder), tmp_path / "in")
    assert load_drafter(tmp_path / "in", CPU).config == DrafterConfig.read(folder)
    assert any(line.startswith("for evaluation only: ") for line in lines) is (not changes.get("sliding_window"))


def foreign(draft: Path, tmp_path: Path, **changes: Any) -> Path:
    """A speculators folder as another trainer writes it: no notes of ours, no copies, the flag at its default."""
    out = tmp_path / "foreign"
    export_drafter(str(draft), "speculators", out)
    (out / "draftsmith.json").unlink()
    (out / "README.md").unlink()
    tensors = load_file(out / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith(("embed", "lm_head"))}, out / "model.safetensors")
    return rewrite(out, **({"num_target_layers": None, "sliding_window_non_causal": False} | changes))


def test_a_drafter_that_speculators_trained_is_taken_in(draft: Path, tmp_path: Path) -> None:
    folder = foreign(draft, tmp_path)
    with pytest.raises(InputError, match="does not say how deep its target is; give it with --target"):
        import_drafter(str(folder), tmp_path / "in")
    import_drafter(str(folder), tmp_path / "in", DEMO)
    assert files(tmp_path / "in")["model.safetensors"] == files(draft)["model.safetensors"]
    assert files(tmp_path / "in")["config.json"] == files(draft)["config.json"]
    assert json.loads((tmp_path / "in" / "draftsmith.json").read_text())["imported_from"] == str(folder)


@pytest.mark.parametrize(("flag", "is_causal"), [(False, None), (True, False)])
def test_sliding_layers_of_speculators_are_read_as_it_trains_them(
    draft: Path, tmp_path: Path, flag: bool, is_causal: bool | None
) -> None:
    nested = config_of(foreign(draft, tmp_path))["transformer_layer_config"]
    nested |= {"layer_types": [FULL, SLIDING], "sliding_window": 9, "use_sliding_window": True}
    folder = rewrite(tmp_path / "foreign", transformer_layer_config=nested, sliding_window_non_causal=flag)
    import_drafter(str(folder), tmp_path / "in", DEMO)
    assert load_drafter(tmp_path / "in", CPU).config.is_causal is is_causal
    with pytest.raises(InputError, match="sliding_window_non_causal is missing; speculators takes false then, vLLM"):
        import_drafter(str(_without(folder, "sliding_window_non_causal")), tmp_path / "other", DEMO)


def _without(folder: Path, key: str) -> Path:
    return rewrite(folder, **{key: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'; only dflash"),
        ({"transformer_layer_config": None}, "transformer_layer_config is missing"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"block_size": None}, "block_size is missing"),
        ({"aux_hidden_state_layer_ids": [0, 2, 3, 5, 7]}, "target_layer_ids is [-1, 1, 2, 4, 6]: expected ascending"),
        ({"aux_hidden_state_layer_ids": [2, 3, 5, 7, 10]}, "target_layer_ids is [1, 2, 4, 6, 9]: expected ascending"),
        ({"aux_hidden_state_layer_ids": ["x", None]}, "a value has the wrong type: invalid literal for int()"),
        ({"aux_hidden_state_layer_ids": 7}, "a value has the wrong type: 'int' object is not iterable"),
        ({"transformer_layer_config": {"layer_types": 7}}, "a value has the wrong type"),
        ({"draft_vocab_size": 100}, "draft_vocab_size is 100, expected 2048"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, expected 128"),
    ],
)
def test_a_malformed_speculators_config_is_refused(
    draft: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = foreign(draft, tmp_path, **changes)
    with pytest.raises(InputError) as caught:
        import_drafter(str(folder), tmp_path / "in", DEMO)
    assert str(caught.value).startswith(f"{folder}/config.json: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", torch.zeros(4), "d2t maps a reduced vocabulary"),
        ("embed_tokens.weight", torch.zeros(7, 128), r"embed_tokens.weight is \(7, 128\), config.json says"),
        ("embed_tokens.weight", torch.zeros(2048, 128), "embed_tokens.weight is not that of demo"),
        ("lm_head.weight", torch.zeros(2048, 128), "lm_head.weight is not that of demo"),
        ("other.weight", torch.zeros(3), r"tensors 1 unknown \(other.weight\)"),
    ],
)
def test_tensors_that_are_not_the_drafters_are_looked_at(
    draft: Path, tmp_path: Path, name: str, tensor: Tensor, message: str
) -> None:
    path = foreign(draft, tmp_path) / "model.safetensors"
    save_file(load_file(path) | {name: tensor}, path)
    with pytest.raises(InputError, match=message):
        import_drafter(str(path.parent), tmp_path / "in", DEMO)


def test_the_targets_own_copies_are_left_out_and_named(draft: Path, tmp_path: Path) -> None:
    export_drafter(str(draft), "speculators", tmp_path / "there")
    lines = import_drafter(str(tmp_path / "there"), tmp_path / "in", DEMO)
    assert "left out, being the target's own: embed_tokens.weight, lm_head.weight" in lines


def test_another_target_is_refused(draft: Path, tmp_path: Path) -> None:
    save_drafter(tmp_path / "tiny", tiny_drafter(), dtype=torch.float32, provenance={}, card="")
    with pytest.raises(InputError, match="does not say what target it was trained for; give it with --target"):
        export_drafter(str(tmp_path / "tiny"), "speculators", tmp_path / "out")
    message = "made for another target than demo: layers 5, not 10, hidden size 32, not 128, vocabulary 64, not 2048"
    with pytest.raises(InputError, match=message):
        import_drafter(str(tmp_path / "tiny"), tmp_path / "out", DEMO)
    with pytest.raises(InputError, match=message):
        export_drafter(str(tmp_path / "tiny"), "zlab", tmp_path / "out", DEMO)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|save_embedding_layers)")
def test_a_target_with_an_adapter_has_no_name(draft: Path, tmp_path: Path) -> None:
    """speculators would load the base instead, so the copies inside, of the merged weights, are what it must use."""
    settings = LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(embedded.TARGET), settings).save_pretrained(tmp_path / "lora")
    spec = TargetSpec("demo", adapter=str(tmp_path / "lora"))
    export_drafter(str(draft), "speculators", tmp_path / "there", spec)
    assert config_of(tmp_path / "there")["speculators_config"]["verifier"]["name_or_path"] is None
    copy = load_file(tmp_path / "there" / "model.safetensors")["embed_tokens.weight"]
    base = load_file(embedded.TARGET / "model.safetensors")["model.embed_tokens.weight"]
    assert copy.shape == base.shape
    assert not torch.equal(copy, base)
    with pytest.raises(InputError, match=r"embed_tokens\.weight is not that of demo"):
        import_drafter(str(tmp_path / "there"), tmp_path / "in", DEMO)
    import_drafter(str(tmp_path / "there"), tmp_path / "in", spec)


def test_nothing_is_overwritten(draft: Path, tmp_path: Path) -> None:
    before = files(draft)
    for convert in (lambda: export_drafter(str(draft), "zlab", draft), lambda: import_drafter(str(draft), draft)):
        with pytest.raises(ConfigError, match="is there already; give a new folder"):
            convert()
    with pytest.raises(ConfigError, match=r"DIR is './nowhere': give an existing drafter folder or hub id"):
        import_drafter("./nowhere", tmp_path / "out")
    assert files(draft) == before


def test_a_speculators_folder_is_not_taken_for_ours(draft: Path, tmp_path: Path) -> None:
    export_drafter(str(draft), "speculators", tmp_path / "there")
    with pytest.raises(InputError, match=r"in the speculators layout; first: draftsmith import \S+/there OUT"):
        load_drafter(tmp_path / "there", CPU)


def test_an_imported_drafter_decodes_as_the_original(draft: Path, tmp_path: Path) -> None:
    export_drafter(str(draft), "speculators", tmp_path / "there")
    import_drafter(str(tmp_path / "there"), tmp_path / "in")
    outcomes = []
    for folder in (draft, tmp_path / "in"):
        target, drafter = load_pair(TargetSpec("demo"), folder, CPU)
        ids = Renderer(target.tokenizer).prompt_ids(read_prompts(["demo"])[0])
        outcomes.append(speculative_generate(target, drafter, ids, 24).rounds)
    assert outcomes[0] == outcomes[1]


def test_the_commands(draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    assert cli.main(["export", str(draft), "--to", "speculators", str(there)]) == 0
    assert f"{there}: speculators layout, " in capsys.readouterr().out
    assert cli.main(["import", str(there), str(back), "--target", "demo"]) == 0
    assert "read from the speculators layout" in capsys.readouterr().out
    assert files(back) == files(draft)
    assert cli.main(["import", str(there), str(back)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert cli.main(["import", str(there), str(tmp_path / "x"), "--adapter", "a"]) == 2
    assert "--adapter is of a target; give --target too" in capsys.readouterr().err


def test_nothing_but_a_new_or_empty_folder_is_taken(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename would put the folder in the place of a pipe, a device or a link."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "empty")
    for name in ("pipe", "link", "linked"):
        with pytest.raises(ConfigError, match=f"OUT .*{name} is there already; give a new folder"):
            export_drafter(str(draft), "zlab", tmp_path / name)
    with pytest.raises(ConfigError, match="pipe is there and no folder"):
        write_folder(tmp_path / "pipe", {}, {})
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError, match="is the folder you are in"):
        export_drafter(str(draft), "zlab", Path())
    export_drafter(str(draft), "zlab", tmp_path / "new")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff", "draftsmith.json is no UTF-8 text"),
        (b"[1]", "draftsmith.json is no JSON object"),
        (b'{"target": 5}', "draftsmith.json: target is 5, expected a string"),
    ],
)
def test_a_damaged_note_is_named(content: bytes, said: str, draft: Path, tmp_path: Path) -> None:
    (draft / "draftsmith.json").write_bytes(content)
    with pytest.raises(InputError, match=said):
        export_drafter(str(draft), "speculators", tmp_path / "out")


def test_a_damaged_card_is_named(draft: Path, tmp_path: Path) -> None:
    (draft / "README.md").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"README\.md is no UTF-8 text"):
        export_drafter(str(draft), "zlab", tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 1e30), ("hidden_size", 10**9), ("vocab_size", 0), ("max_position_embeddings", -5),
        ("rms_norm_eps", float("nan")), ("rms_norm_eps", 0), ("head_dim", float("inf")),
    ],
)  # fmt: skip
def test_an_impossible_number_is_named(key: str, value: Any, draft: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"config.json: .*({key}|infinity)"):
        export_drafter(str(rewrite(draft, **{key: value})), "zlab", tmp_path / "out")


def test_a_full_disk_leaves_nothing_half_done(draft: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 100_000) as disk:
        with pytest.raises(OSError, match="No space left on device") as caught:
            export_drafter(str(draft), "zlab", disk / "out")
        assert explained(caught.value) == (
            f"{disk / 'out'}: No space left on device; free some space, or choose a place that has it"
        )
        assert not list(disk.iterdir())


def test_a_file_that_may_not_grow_leaves_nothing_half_done(draft: Path, tmp_path: Path) -> None:
    with largest_file(10_000), pytest.raises(OSError, match=r"File too large: '.*/out'"):
        export_drafter(str(draft), "zlab", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"draft"}
