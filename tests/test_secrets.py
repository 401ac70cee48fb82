"""Secrets that are there while the program runs are in nothing that it prints or writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith import cli
from draftsmith.doctor import report as doctor_report
from draftsmith.doctor.check import Check
from draftsmith.redaction import HIDDEN
from regenerate_servers import serving

PLANTED = {
    "HF_TOKEN": "hf_" + "PlantedPlantedPlanted01",
    "OPENAI_API_KEY": "sk-" + "planted-planted-planted-02",
    "OWN_SECRET": "planted words, planted words",
}
SECRETS = [*PLANTED.values(), "planted-password", "planted-in-a-url"]
WITH_PASSWORD = "http://me:planted-password@127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


def clean(*texts: str) -> None:
    """No secret in any of the texts, or in any file below the current folder."""
    files = {str(p): p.read_bytes().decode("utf-8", "replace") for p in Path().rglob("*") if p.is_file()}
    for place, text in {**{f"text {n}": text for n, text in enumerate(texts)}, **files}.items():
        for secret in SECRETS:
            assert secret not in text, f"{secret} is in {place}"


def test_a_run_and_its_reports(demo_config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that training, measuring and exporting leave."""
    config = demo_config(train__steps=1, run__dir="run", eval__every=1, eval__limit=1, eval__max_new_tokens=4)
    Path("c.yaml").write_text(yaml.safe_dump(config.model_dump()))
    Path("p.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    common = ["--target", "demo", "--draft", "run/draft", "--max-new-tokens", "4"]
    for arguments in (
        ["train", "c.yaml"],
        ["eval", *common, "--prompts", "p.jsonl", "--json", "eval.json"],
        ["export", "run/draft", "--to", "zlab", "exported"],
    ):
        assert cli.main(arguments) == 0
    left = {path.name for path in Path("run").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "draft", "best", "rejects.jsonl"} <= left
    clean(*capsys.readouterr())


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "c.yaml", "--set", f"target.revision={PLANTED['HF_TOKEN']}"],
        ["train", "c.yaml", "--set", f"run.dir={WITH_PASSWORD}"],
        ["train", "c.yaml", "--set", f"data.template_arguments={{key: '{PLANTED['OWN_SECRET']}'}}"],
        ["train", "c.yaml", "--set", f"train.steps={PLANTED['OPENAI_API_KEY']}"],
        [
            "data",
            "prepare",
            "demo",
            "--target",
            "demo",
            "--out",
            "o",
            "--template-argument",
            f"k={PLANTED['HF_TOKEN']}",
        ],
        ["data", "regenerate", "demo", "--server", WITH_PASSWORD, "--out", "o"],
        ["data", "regenerate", "demo", "--server", "http://h/v1?token=planted-in-a-url", "--out", "o"],
        [
            "data",
            "regenerate",
            "demo",
            "--server",
            "http://h",
            "--out",
            "o",
            "--request-field",
            f"user={PLANTED['HF_TOKEN']}",
        ],
    ],
)
def test_secrets_in_arguments_and_configs_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They would be written down. The answer does not repeat them."""
    Path("c.yaml").write_text("run: {dir: run}\ntarget: {model: demo}\ndata: {train: [demo]}\n")
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    clean(*shown)


def test_an_argument_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "c.yaml", "--api-key", PLANTED["OPENAI_API_KEY"]])
    shown = capsys.readouterr()
    assert HIDDEN in shown.err
    clean(*shown)


def test_what_a_server_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "toolong!:1"}]}) + "\n")
    with serving() as (url, seen):
        arguments = ["data", "regenerate", "in.jsonl", "--server", url, "--out", "o", "--attempts", "1"]
        assert cli.main([*arguments, "--api-key-env", "OPENAI_API_KEY"]) == 0
    assert seen.keys == {f"Bearer {PLANTED['OPENAI_API_KEY']}"}
    assert "refused: your key is" in Path("o/rejects.jsonl").read_text()
    clean(*capsys.readouterr())


def test_the_doctors_findings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finding = Check(
        "versions", "warn", f"index {WITH_PASSWORD} and {PLANTED['OWN_SECRET']}", f"try {PLANTED['HF_TOKEN']}"
    )
    monkeypatch.setattr(doctor_report, "run_checks", lambda *a, **k: [finding])
    assert cli.main(["doctor", "--json", "found.json"]) == 0
    assert (
        json.loads(Path("found.json").read_text())["checks"][0]["evidence"]
        == f"index http://{HIDDEN}@127.0.0.1:9/v1 and {HIDDEN}"
    )
    clean(*capsys.readouterr())


CRASH = """
import sys
from draftsmith import cli
from draftsmith.commands import compiler
def broken(options):
    error = RuntimeError("cannot reach http://me:planted-password@127.0.0.1:9/v1")
    error.add_note("with the token hf_PlantedPlantedPlanted01")
    raise error from OSError("planted words, planted words")
compiler._cache_info = broken
sys.exit(cli.main(["cache", "info"]))
"""


def test_a_crash_and_an_unreachable_hub() -> None:
    """Tracebacks, notes and causes; addresses with a password in them."""
    environment = os.environ | {"HF_ENDPOINT": WITH_PASSWORD, "HF_HUB_OFFLINE": "0", "HF_HOME": "hub"}
    crash = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, env=environment, timeout=60)
    assert crash.returncode == 1
    assert "Traceback" in crash.stderr
    assert "RuntimeError: cannot reach http://<secret>@127.0.0.1:9/v1" in crash.stderr
    arguments = [sys.executable, "-m", "draftsmith.cli", "export", "own/draft", "--to", "zlab", "o"]
    hub = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=60)
    assert hub.returncode == 1
    assert "the hub does not give it" in hub.stderr
    clean(crash.stderr, crash.stdout, hub.stderr, hub.stdout)
