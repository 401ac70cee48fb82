"""What a failed run leaves: enough to understand it, nothing private; a good end takes it away."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import run_training
from draftsmith.config import Config
from draftsmith.pipeline import trainer
from draftsmith.pipeline.workers import DrafterWorker

MakeConfig = Callable[..., Config]
SECRET = "hf_abcdefghijklmnopqrstuvwx"


def failing(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DrafterWorker.forward

    def fail(self: DrafterWorker, features: Any, blocks: Any) -> Any:
        if features.row.index == 9:
            raise RuntimeError(message)
        return forward(self, features, blocks)

    monkeypatch.setattr(DrafterWorker, "forward", fail)


def report_of(config: Config) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((Path(config.run.dir) / "crash-report.json").read_text())
    return report


def test_a_failed_run_leaves_a_report(demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    failing("planted", monkeypatch)
    config = demo_config(topology="2+1", pipeline__threads=1, checkpoint__every=1)
    with pytest.raises(RuntimeError, match="planted"):
        run_training(config)
    report = report_of(config)
    assert report["error"]["type"] == "RuntimeError"
    assert report["error"]["message"] == "planted"
    assert any("in fail" in line for line in report["error"]["traceback"])
    assert report["worker"] == "drafter cpu:2"
    assert set(report["workers"]) == {"target cpu:0", "target cpu:1", "drafter cpu:2"}
    assert {"MainThread", "drafter cpu:2"} <= set(report["threads"])
    assert [record["step"] for record in report["last_metrics"]] == [1, 2]
    assert report["channel"]["capacity_bytes"] == config.pipeline.channel_mib * 2**20
    assert report["versions"]["torch"]
    assert report["config"]["train"]["rows_per_step"] == 4
    assert any(line.startswith("topology: ") for line in report["decisions"])
    assert len(report["compilations"]["guarded"]) <= 20
    assert "drafter cpu:2 failed after step 2: RuntimeError: planted" in report["summary"]
    assert len(report["summary"]) < 24


def test_it_may_be_shown_to_anybody(
    demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, some_conversations: Path
) -> None:
    """No secrets, no home directory, no folders of the user's files, nothing of the data."""
    home = str(some_conversations.parent)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("MY_API_KEY", "a-very-private-value")
    said = f"cannot fetch https://me:pw@host/x?token=123456789 {SECRET} a-very-private-value {home}/x '/srv/project/y'"
    failing(said, monkeypatch)
    config = demo_config()
    with pytest.raises(RuntimeError):
        run_training(config)
    text = (Path(config.run.dir) / "crash-report.json").read_text()
    for private in (SECRET, "a-very-private-value", "me:pw", "123456789", home, "/srv", "project", config.run.dir):
        assert private not in text
    assert "…/x '…/y'" in text
    assert "https://<secret>@host/x?token=<secret>" in text
    assert "…/pipeline/workers.py" in text
    assert report_of(config)["config"]["data"]["train"] == ["…/conversations.jsonl"]
    content = json.loads(some_conversations.read_text().splitlines()[0])["messages"][-1]["content"]
    assert content[:40] not in text


def test_a_good_end_puts_the_report_by(demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    failing("planted", monkeypatch)
    config = demo_config(checkpoint__every=1)
    with pytest.raises(RuntimeError):
        run_training(config)
    assert (Path(config.run.dir) / "crash-report.json").is_file()
    monkeypatch.undo()
    result, _, _ = run_training(config, resume=True)
    assert result.finished
    assert not {"crash-report.json", "fatal-stacks.txt"} & set(os.listdir(config.run.dir))
    assert json.loads((Path(config.run.dir) / "crash-report.old.json").read_text())["error"]["message"] == "planted"


def test_a_run_that_was_killed_when_all_was_well_is_tidied_up(demo_config: MakeConfig) -> None:
    """Stacks of a fatal error stay: no report has been made of them."""
    result, _, _ = run_training(demo_config())
    (result.folder / "crash-report.json").write_text("{}")
    for stacks, stay in (("", False), ("Fatal Python error", True)):
        (result.folder / "fatal-stacks.txt").write_text(stacks)
        assert run_training(demo_config(), resume=True)[0].finished
        assert not (result.folder / "crash-report.json").exists()
        assert (result.folder / "fatal-stacks.txt").exists() is stay


def test_a_failure_before_the_workers_leaves_one_too(demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not make the directory count as used."""

    def broken(config: Config, resolved: Any) -> Any:
        raise RuntimeError("planted while preparing")

    monkeypatch.setattr(trainer, "prepare", broken)
    config = demo_config()
    with pytest.raises(RuntimeError):
        run_training(config)
    assert "failed while preparing: RuntimeError: planted while preparing" in report_of(config)["summary"]
    monkeypatch.undo()
    result, _, _ = run_training(config)
    assert result.finished


def test_a_disk_that_takes_no_report_does_not_hide_the_cause(
    demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("planted", monkeypatch)
    config = demo_config()
    (Path(config.run.dir) / "crash-report.json").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="planted"):
        run_training(config)
