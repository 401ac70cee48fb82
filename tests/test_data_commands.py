"""`draftsmith data prepare` as a person calls it, and training on what it leaves."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import yaml

from chats import chat
from draftsmith import cli, embedded
from draftsmith.errors import explained, written_below


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    good = [{"messages": chat(f"u:What is {i} plus {i}?", f"a:It is {2 * i}.")} for i in range(60)]
    first, second = tmp_path / "a.jsonl", tmp_path / "b.json"
    first.write_text("\n".join([*map(json.dumps, good), "{broken", '{"messages": [']))
    second.write_text(json.dumps([{"instruction": "Say hi.", "output": f"Hi {i}."} for i in range(20)], indent=1))
    return [str(first), str(second)]


def prepare(*arguments: str) -> int:
    return cli.main(["data", "prepare", "--target", "demo", *arguments])


def test_it_prints_what_it_decided_and_ends_with_the_counts(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"messages": chat("u:What is 7 plus 7?")}) + "\n")
    assert prepare(*files, "--out", str(out), "--prompts", str(prompts)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "80 conversations kept, 2 rejected"
    assert f"form of {files[0]}: messages in lines (the keys in line 1)" in said
    assert f"form of {files[1]}: instruction in values (the keys in line 2)" in said
    assert "loss mask: generation marks (the chat template marks its answers)" in said
    assert any(line.startswith("80 documents, ") and "0 conversations are copies" in line for line in said)
    assert any(line.startswith("contamination: 1 conversations contain 1 of the evaluation prompts") for line in said)
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert [(r["file"], r["line"]) for r in rejects] == [(files[0], 61), (files[0], 62)]
    assert all(r["reason"].startswith("not JSON") for r in rejects)
    assert prepare(*files, "--out", str(out), "--prompts", str(prompts)) == 0
    assert "2 of 2 shards were there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["none.jsonl"], 1, "data.train: none.jsonl cannot be read: No such file"),
        (["demo", "--form", "chatml"], 2, "data.form is 'chatml'; known forms are messages, sharegpt"),
        (["demo", "--thinking"], 2, "data.thinking: the chat template has no switch for thinking"),
        (["demo", "--template-argument", "x"], 2, "--template-argument x: write it as name=value"),
        (["demo", "--template-argument", 'x="\\U9"'], 2, '--template-argument x="\\U9": the value is not YAML'),
        (["demo", "--template-argument", 'x="\\U99999999"'], 2, '--template-argument x="\\U99999999": the value'),
        (["demo", "--template-argument", "x=1"], 2, "data.template_arguments: the chat template has no variable x"),
        (["demo", "--template-date", "today"], 2, "--template-date today: write it as YYYY-MM-DD"),
        (["demo", "--drop-contaminated"], 2, "--drop-contaminated needs the evaluation prompts"),
        (["demo", "--prompts", "none.jsonl"], 1, "prompts: none.jsonl cannot be read"),
        ([""], 1, "data.train: a name is empty"),
        (
            ["demo", "--template-argument", "x=2020-01-01"],
            2,
            "--template-argument x=2020-01-01: JSON has no such value",
        ),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(*arguments, "--out", str(tmp_path / "out")) == code
    assert capsys.readouterr().err.startswith(f"draftsmith: {said}")


def test_nothing_kept_is_said_with_the_first_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{broken\n")
    assert prepare(str(path), "--out", str(tmp_path / "out")) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 conversations kept, 1 rejected"


def test_a_plan_and_a_config_take_the_folder_like_the_files(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert prepare(*files, "--out", out) == 0
    rows = []
    for number, train in enumerate((files, [out])):
        config = yaml.safe_load(embedded.CONFIG.read_text())
        config["run"] = {"dir": str(tmp_path / f"run{number}")}
        config["data"] = {"train": train, "row_tokens": 64}
        config["eval"].pop("prompts", None)
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(config))
        capsys.readouterr()
        assert cli.main(["train", str(path), "--plan"]) == 0
        rows.append(" ".join(capsys.readouterr().out.split()))
    assert "82 conversations = 76 to train on + 4 held out + 2 rejected" in rows[0]
    assert rows[0] == rows[1]
    assert cli.main(["init", "--target", "demo", "--data", out, "--out", str(tmp_path / "new.yaml")]) == 0


def test_a_prepared_or_half_prepared_folder_is_no_raw_data(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert prepare(*files, "--out", str(out)) == 0
    assert prepare(str(out), "--out", str(tmp_path / "again")) == 1
    assert "is prepared data already; `train` takes it as it is" in capsys.readouterr().err
    half = tmp_path / "half"
    shutil.copytree(out, half)
    (half / "manifest.json").rename(half / "preparing.json")
    assert cli.main(["init", "--target", "demo", "--data", str(half), "--out", str(tmp_path / "new.yaml")]) == 1
    assert "is not finished; run the same `draftsmith data prepare` again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--request-field", "x=2020-01-01"], "--request-field x=2020-01-01: JSON has no such value"),
        (["--request-field", "messages=[]"], "--request-field messages: draftsmith fills it"),
        (["--api-key-file", "key"], "--api-key-file key: the key has characters that no HTTP header can hold"),
    ],
)
def test_a_request_that_cannot_be_sent_is_refused_before_it_is(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("k\u00e9y\n", encoding="utf-8")
    asked = ["data", "regenerate", "demo", "--server", "http://127.0.0.1:9", "--model", "m", "--out", "out"]
    assert cli.main([*asked, *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"draftsmith: {said}")
    assert not Path("out").exists()


@pytest.mark.parametrize("option", ["--seed", "--epoch"])
def test_inspect_refuses_a_negative_number(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["data", "inspect", "demo", "--target", "demo", option, "-1"])
    assert "is not a whole number from 0" in capsys.readouterr().err


def test_a_full_disk_is_named_with_the_folder() -> None:
    with pytest.raises(OSError, match="No space") as caught, written_below("out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(explained(caught.value)).startswith("out: No space left on device; free some space")
