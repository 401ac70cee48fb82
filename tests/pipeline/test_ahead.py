"""A run compiles before its threads start, counts from then on, and warns if anything was left."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Quiet, run_training
from draftsmith import cli
from draftsmith.compile import guard
from draftsmith.config import Config
from draftsmith.decisions import Decision
from draftsmith.pipeline import prepare, trainer, warmup

MakeConfig = Callable[..., Config]


@pytest.fixture
def flex_on_cpu(flex_in_plain_operators: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: Callable[..., Decision] = lambda config, topology, head_dim: Decision("attention", "flex", "a test")  # noqa: E731
    monkeypatch.setattr(prepare, "choose_attention", chosen)
    monkeypatch.setattr(warmup, "choose_attention", chosen)


def compiles(config: Config) -> list[int]:
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["compiles_after_warmup"] for line in lines]


def losses(quiet: Quiet) -> list[float]:
    return [record.loss for record, _ in quiet.records]


def small(demo_config: MakeConfig, **changes: Any) -> Config:
    values = {
        "topology": "2+2", "pipeline__threads": 1, "train__steps": 3, "train__rows_per_step": 2,
        "data__row_tokens": 128,
        "drafter__layer_types": ["full_attention", "sliding_attention"], "drafter__sliding_window": 20,
    }  # fmt: skip
    return demo_config(**(values | changes))


def test_blockwise_has_nothing_to_compile(demo_config: MakeConfig) -> None:
    config = demo_config(train__steps=2)
    before = guard.count_compilations()
    result, quiet, _ = run_training(config)
    assert warmup.NOTHING in quiet.lines
    assert (compiles(config), result.compiles_after_warmup) == ([0, 0], 0)
    assert guard.count_compilations() == before


def test_training_is_warmed_up_and_compiles_nothing_more(
    demo_config: MakeConfig, flex_on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas, two targets, layers computed twice; the losses are those of blockwise attention."""
    config = small(demo_config, drafter__checkpointing="layer", run__dir=str(tmp_path / "flex"))
    before = guard.count_compilations()
    _, quiet, _ = run_training(config)
    assert [line for line in quiet.lines if line.startswith("warm-up: cpu: attention")]
    assert not [line for line in quiet.lines if line.startswith("warning")]
    assert compiles(config) == [0, 0, 0]
    assert guard.count_compilations() == before + 1
    monkeypatch.setattr(prepare, "choose_attention", lambda *given: Decision("attention", "blockwise", "a test"))
    _, blockwise, _ = run_training(small(demo_config))
    assert losses(quiet) == pytest.approx(losses(blockwise), rel=1e-5)


def test_what_was_not_warmed_up_is_counted_and_told(
    demo_config: MakeConfig, flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "run_signatures", lambda *given: ())
    config = small(demo_config, topology="1+1")
    result, quiet, _ = run_training(config)
    assert compiles(config) == [1, 1, 1]
    assert result.compiles_after_warmup == 1
    assert [line for line in quiet.lines if line.startswith("warning: step 1 compiled something")] != []


def test_the_command_compiles_without_weights_or_data(
    demo_config: MakeConfig, flex_on_cpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(demo_config, data__train=["nowhere.jsonl"])
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config.model_dump()))
    assert cli.main(["warmup", str(tmp_path / "c.yaml")]) == 0
    out = capsys.readouterr().out
    assert "attention: flex (a test)" in out
    assert "cpu: attention, forward and backward" in out
    assert "flex_attention" in out
    assert not Path(config.run.dir).exists()


def test_the_command_says_that_there_is_nothing(
    demo_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(demo_config().model_dump()))
    assert cli.main(["warmup", str(tmp_path / "c.yaml")]) == 0
    assert warmup.NOTHING in capsys.readouterr().out
    assert cli.main(["warmup", str(tmp_path / "c.yaml"), "--set", "drafter.attention=flex"]) == 2
    assert "no backward on the CPU" in capsys.readouterr().err
