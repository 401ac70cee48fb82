"""The demo from start to end, made small: what it leaves behind is what it says."""

import json
import threading
from pathlib import Path

import pytest
import yaml

from draftsmith import demo, embedded
from draftsmith.errors import ConfigError


@pytest.fixture
def small_demo(tmp_path: Path, some_conversations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's own config with less data, fewer prompts and shorter answers."""
    data = yaml.safe_load(embedded.CONFIG.read_text())
    data["data"] |= {"train": [str(some_conversations)], "row_tokens": 256}
    data["eval"] |= {"limit": 2, "max_new_tokens": 24}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(data))
    monkeypatch.setattr(embedded, "CONFIG", tmp_path / "small.yaml")
    monkeypatch.setattr(demo, "WARMUP_STEPS", 4)
    monkeypatch.setattr(demo, "UNTIMED_STEPS", 1)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("small_demo")
def test_the_demo_leaves_what_it_reports() -> None:
    demo.run_demo(0.02, None, threading.Event())
    folder = Path("runs/demo")
    figures = json.loads((folder / "eval.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["steps"] == len(steps)
    assert f"# steps: {len(steps)} (what fits into 0.02 minutes" in (folder / "config.yaml").read_text()
    assert figures["train_tokens"] == sum(step["tokens"] for step in steps)
    assert figures["train_seconds"] == pytest.approx(sum(step["step_s"] for step in steps))
    assert figures["lossless"] is True
    assert 1.0 <= figures["tau_before"] <= 1.5
    assert figures["prompts"] == len((folder / "prompts.jsonl").read_text().splitlines()) == 2
    assert set(figures) >= {
        "tau", "tau_per_prompt", "rounds_per_prompt", "accept_per_position", "tokens_per_second",
        "baseline_tokens_per_second", "speedup", "lossless", "prompts", "new_tokens",
    }  # fmt: skip
    assert (folder / "target" / "model.safetensors").is_file()
    assert (folder / "draft" / "config.json").is_file()


@pytest.mark.usefixtures("small_demo")
def test_the_demo_takes_the_first_free_folder_and_no_used_one(tmp_path: Path) -> None:
    for name in ("demo", "demo-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert demo._free_folder() == Path("runs/demo-3")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ConfigError, match="not an empty directory"):
        demo.run_demo(1, tmp_path / "used", threading.Event())


def test_what_ships_is_small_and_held_out() -> None:
    """Target at most 5 MB, data apart at most 3 MB, and no held-out question among the trained ones."""
    from draftsmith.data.conversations import Conversation, read_conversations, read_prompts

    assert sum(path.stat().st_size for path in embedded.TARGET.iterdir()) <= 5_000_000
    assert embedded.CONVERSATIONS.stat().st_size + embedded.PROMPTS.stat().st_size <= 3_000_000
    conversations = [c for c in read_conversations(["demo"]) if isinstance(c, Conversation)]
    trained = {c.messages[0]["content"] for c in conversations}
    held_out = [prompt.messages[0]["content"] for prompt in read_prompts(["demo"])]
    assert len(conversations) > 10_000
    assert len(held_out) >= 40
    assert not trained & set(held_out)
