"""`draftsmith init` writes a config that says everything, trains, and destroys nothing."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from conftest import run_training
from draftsmith import cli, embedded
from draftsmith.config import Config, load_config
from draftsmith.pipeline.machine import this_machine
from draftsmith.pipeline.plan import make_plan


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with gzip.open(embedded.CONVERSATIONS, "rt") as file:
        Path("chats.jsonl").write_text("".join(itertools.islice(file, 60)))


def init(*arguments: str) -> int:
    return cli.main(["init", *arguments])


def target(**changes: Any) -> str:
    """A folder with only a config."""
    values = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 100, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 512,
    }  # fmt: skip
    Path("my model").mkdir()
    Path("my model/config.json").write_text(json.dumps(values | changes))
    return "my model"


def keys(model: type[BaseModel] = Config) -> list[tuple[str, str | None]]:
    """Every key of the schema with its description."""
    found: list[tuple[str, str | None]] = []
    for name, info in model.model_fields.items():
        section = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        found += keys(info.annotation) if section else [(name, info.description)]  # type: ignore[arg-type]
    return found


def test_the_written_config_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert init("--target", "demo", "--data", "chats.jsonl", "--out", "mine.yaml") == 0
    assert capsys.readouterr().out == "wrote mine.yaml; next: draftsmith train mine.yaml --plan\n"
    small = ["train.steps=1", "train.rows_per_step=1", "data.row_tokens=256", "eval.every=0"]
    result, _, _ = run_training(load_config(Path("mine.yaml"), small))
    assert result.finished
    assert result.folder == Path("runs/demo")


def test_it_says_what_was_asked_and_defaults_else() -> None:
    init("--target", "demo", "--data", "chats.jsonl", "demo")
    config = load_config(Path("draftsmith.yaml"))
    assert (config.target.model, config.data.train) == ("demo", ["chats.jsonl", "demo"])
    assert (config.drafter.layers, config.drafter.block_size, config.train.lr) == (2, 16, 6e-4)
    assert make_plan(config, this_machine()).refusal is None


def test_every_key_stands_there_with_its_description_and_default() -> None:
    init("--target", "demo", "--data", "demo")
    text = Path("draftsmith.yaml").read_text()
    for name, description in keys():
        assert any(line.strip().lstrip("# ").startswith(f"{name}: ") and line.endswith(f"  # {description}")
                   for line in text.splitlines()), name  # fmt: skip
    head, _, body = text.partition("\n\n")
    assert all(line.startswith("# ") or line.startswith("#   ") for line in head.splitlines())
    everything = yaml.safe_load(_uncommented(body))
    assert Config.model_validate(everything) == load_config(Path("draftsmith.yaml"))


def _uncommented(text: str) -> str:
    """Keys behind a # come to life; descriptions stay comments."""
    lines = text.splitlines()
    return "\n".join(line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line for line in lines)


def test_a_second_run_gets_another_folder() -> None:
    Path("runs/demo").mkdir(parents=True)
    init("--target", "demo", "--data", "demo")
    assert load_config(Path("draftsmith.yaml")).run.dir == "runs/demo-2"


def test_rows_and_layers_follow_the_target() -> None:
    folder = target(hidden_size=8192, head_dim=2048, num_hidden_layers=40)
    init("--target", folder, "--data", "demo")
    config = load_config(Path("draftsmith.yaml"))
    assert config.data.row_tokens == 512  # the target's longest
    assert config.drafter.layers == 5
    assert config.run.dir == "runs/my-model"
    assert config.pipeline.channel_mib == 4 * (512 * 5 * 8192 * 4 >> 20)


def test_a_target_without_an_mlp_width_gets_one() -> None:
    values = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 256}
    Path("gpt").mkdir()
    Path("gpt/config.json").write_text(json.dumps(values))
    init("--target", "gpt", "--data", "demo")
    assert load_config(Path("draftsmith.yaml")).drafter.intermediate_size == 128


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--target", "demo", "--data", "none.jsonl"], 1, "none.jsonl cannot be read: No such file"),
        (["--target", "./nowhere", "--data", "demo"], 1, "target.model: folder ./nowhere does not exist"),
        (["--target", "nobody/nothing", "--data", "demo"], 1, "target.model 'nobody/nothing' cannot be loaded"),
        (
            ["--target", "demo", "--data", "bad.jsonl"],
            1,
            "holds no conversation in its first 100 records; first reason: ",
        ),
        (["--target", "demo", "--data", "empty.jsonl"], 1, "first reason: no records"),
        (["--target", "demo", "--data", "demo", "--out", "bad.jsonl"], 2, "--out bad.jsonl exists"),
        (["--target", "demo", "--data", "demo", "--out", "no/c.yaml"], 2, "--out no/c.yaml cannot be written: No such"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_writes_nothing(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.jsonl").write_text("{broken\n")
    Path("empty.jsonl").write_text("")
    assert init(*arguments) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert Path("bad.jsonl").read_text() == "{broken\n"
    assert not Path("draftsmith.yaml").exists()
