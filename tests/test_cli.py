"""Exit codes, and one line instead of a traceback for whatever a person can get wrong."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from conftest import tiny_drafter
from draftsmith import __version__, cli, embedded
from draftsmith.commands import decode
from draftsmith.commands.signals import stoppable
from draftsmith.drafter.checkpoint import save_drafter
from draftsmith.errors import ConfigError, InputError

Outcome = tuple[int, str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    transformers.logging.disable_progress_bar()  # the command line's environment does it, but was set too late here
    monkeypatch.setattr(os, "_exit", _left)  # the last resort of `main`: here it would end pytest


def _left(code: int) -> None:
    raise AssertionError(f"the process left with {code}: an error was not expected by the command line")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def call(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = cli.main([str(a) for a in arguments])
        return code, capsys.readouterr().err

    return call


def only_line(outcome: Outcome, code: int) -> str:
    assert outcome[0] == code, outcome
    assert outcome[1].startswith("draftsmith: "), outcome
    assert outcome[1].count("\n") == 1, outcome
    return outcome[1]


def config(**changes: Any) -> Path:
    data: dict[str, Any] = {"run": {"dir": "run"}, "target": {"model": "demo"}, "data": {"train": ["demo"]}}
    Path("c.yaml").write_text(json.dumps(data | changes))
    return Path("c.yaml")


@pytest.fixture
def prompts() -> Path:
    Path("p.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    return Path("p.jsonl")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A drafter for a target of 5 layers and hidden size 32."""
    save_drafter(tmp_path / "draft", tiny_drafter(), dtype=torch.float32, provenance={}, card="")
    return tmp_path / "draft"


def evaluate(
    run: Callable[..., Outcome], draft: Path, prompts: Path, *more: str | Path, target: str = "demo"
) -> Outcome:
    return run("eval", "--target", target, "--draft", draft, "--prompts", prompts, *more)


def test_version_and_help_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["--help"], ["train", "--help"]):
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert left.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["train"],
        ["train", "c.yaml", "--nonsense"],
        ["eval", "--target", "demo"],
        ["demo", "--minutes", "0"],
        ["demo", "--minutes", "abc"],
        ["demo", "--minutes", "nan"],
    ],
)
def test_bad_arguments_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "minutes" not in " ".join(arguments) or f"{arguments[-1]} is not a positive number" in said


def test_a_bad_config_exits_2_with_file_line_and_key(run: Callable[..., Outcome]) -> None:
    said = only_line(run("train", config(train={"stepz": 3})), 2)
    assert said == "draftsmith: c.yaml:1: unknown key train.stepz; did you mean train.steps?\n"
    assert "c.yaml: not YAML" in only_line(run("train", _file("c.yaml", "seed: 2024-13-45")), 2)
    assert "cannot be read: No such file" in only_line(run("train", "none.yaml"), 2)
    assert "--set x: write it as" in only_line(run("train", config(), "--set", "x"), 2)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "2x2"}, "topology is '2x2': give T+D"),
        ({"topology": "0+1"}, "topology is '0+1': give T+D"),
        ({"drafter": {"mask_token": 99_999}}, "drafter.mask_token is 99999: the embedding has ids 0..2047"),
        ({"drafter": {"init": "nowhere"}}, "drafter.init is 'nowhere': give target, random, or an existing"),
    ],
)
def test_a_value_that_does_not_fit_the_target_exits_2(
    changes: dict[str, Any], message: str, run: Callable[..., Outcome]
) -> None:
    assert message in only_line(run("train", config(**changes)), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"train": ["none.jsonl"]}}, "data.train: none.jsonl cannot be read: No such file"),
        ({"data": {"train": ["bad.jsonl"]}}, "first reason: bad.jsonl:1: not JSON"),
        ({"target": {"model": "./nowhere"}}, "target.model: folder ./nowhere does not exist"),
        ({"target": {"model": "nobody/nothing"}}, "target.model 'nobody/nothing' cannot be loaded"),
        ({"eval": {"prompts": ["none.jsonl"]}}, "prompts: none.jsonl cannot be read: No such file"),
        ({"eval": {"prompts": ["bad.jsonl"]}}, "bad.jsonl:1: not JSON"),
    ],
)
def test_what_cannot_be_used_exits_1_by_name(
    changes: dict[str, Any], message: str, run: Callable[..., Outcome]
) -> None:
    _file("bad.jsonl", "{broken\n")
    assert message in only_line(run("train", config(**changes)), 1)


def test_a_run_dir_that_is_taken_exits_2_and_is_left_alone(run: Callable[..., Outcome]) -> None:
    Path("run").mkdir()
    _file("run/thesis.txt", "years of work")
    assert "run.dir run is not empty; use --resume" in only_line(run("train", config()), 2)
    assert [item.name for item in Path("run").iterdir()] == ["thesis.txt"]
    assert "--out run is not an empty directory" in only_line(run("demo", "--out", "run"), 2)
    assert "run.dir c.yaml is a file" in only_line(run("train", config(), "--set", "run.dir=c.yaml"), 2)


def test_prompt_files_are_refused_by_line(run: Callable[..., Outcome], draft: Path) -> None:
    save_drafter(draft, _demo_drafter(), dtype=torch.float32, provenance={}, card="")
    for text, message in (
        ('{"prompt": "x"}\n{broken\n', "p.jsonl:2: not JSON"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "p.jsonl:1: messages must end in a user or tool"),
        ('{"messages": [{"role": "tool", "content": "x"}]}\n', "p.jsonl:1: the chat template refuses it: Unknown role"),
        ("\n", "prompts: p.jsonl holds no prompt"),
    ):
        assert message in only_line(evaluate(run, draft, _file("p.jsonl", text)), 1)
    assert "prompts: none.jsonl cannot be read" in only_line(evaluate(run, draft, Path("none.jsonl")), 1)


def test_a_folder_that_is_no_drafter_exits_1(run: Callable[..., Outcome], prompts: Path, draft: Path) -> None:
    assert "nowhere is not a drafter folder" in only_line(evaluate(run, Path("nowhere"), prompts), 1)
    said = only_line(evaluate(run, embedded.TARGET, prompts), 1)
    assert "config.json: architectures is ['Qwen3ForCausalLM'], expected ['DFlashDraftModel']" in said
    (draft / "model.safetensors").write_bytes(b"nonsense")
    assert "model.safetensors is damaged or cut short" in only_line(evaluate(run, draft, prompts), 1)
    (draft / "config.json").write_text("{broken")
    assert "config.json:1: not JSON" in only_line(evaluate(run, draft, prompts), 1)


def test_a_drafter_for_another_target_exits_1(run: Callable[..., Outcome], prompts: Path, draft: Path) -> None:
    assert (
        "was made for another target than demo: layers 5, not 10, hidden size 32, not 128, vocabulary 64, not 2048"
        in only_line(evaluate(run, draft, prompts), 1)
    )


def test_an_unknown_target_exits_1(run: Callable[..., Outcome], prompts: Path, draft: Path) -> None:
    said = only_line(evaluate(run, draft, prompts, target="./nowhere"), 1)
    assert "folder ./nowhere does not exist" in said
    said = only_line(evaluate(run, draft, prompts, target="nobody/nothing"), 1)
    assert "nobody/nothing' cannot be loaded" in said


def test_impossible_eval_arguments_exit_2_before_anything_is_loaded(run: Callable[..., Outcome], prompts: Path) -> None:
    nowhere = Path("nowhere")
    assert "--max-new-tokens must be at least 2" in only_line(
        evaluate(run, nowhere, prompts, "--max-new-tokens", "1"), 2
    )
    assert "--json no/where.json: no is not a folder" in only_line(
        evaluate(run, nowhere, prompts, "--json", "no/where.json"), 2
    )
    assert "--json . is a folder" in only_line(evaluate(run, nowhere, prompts, "--json", "."), 2)
    assert "give at most 1048576" in only_line(evaluate(run, nowhere, prompts, "--max-new-tokens", str(10**20)), 2)
    assert "1 to 4096" in only_line(evaluate(run, nowhere, prompts, "--tree", "1000000"), 2)
    assert "--temperature is 1e-300" in only_line(evaluate(run, nowhere, prompts, "--temperature", "1e-300"), 2)


def test_eval_is_done(run: Callable[..., Outcome], prompts: Path, draft: Path) -> None:
    save_drafter(draft, _demo_drafter(), dtype=torch.float32, provenance={}, card="")
    code, _ = evaluate(run, draft, prompts, "--max-new-tokens", "4", "--json", "e.json")
    assert code == 0
    assert json.loads(Path("e.json").read_text())["lossless"] is True


def test_an_error_is_one_line_even_if_its_cause_was_not(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, code in ((InputError("first\nsecond"), 1), (ConfigError("first\nsecond"), 2)):
        monkeypatch.setattr(decode, "_eval", _raising(error))
        assert only_line(run("eval", "--target", "t", "--draft", "d", "--prompts", "p"), code).endswith(
            "first second\n"
        )


def test_ctrl_c_outside_training_exits_130(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_eval", _raising(KeyboardInterrupt()))
    assert "interrupted" in only_line(run("eval", "--target", "t", "--draft", "d", "--prompts", "p"), 130)


def test_the_first_signal_asks_and_the_second_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, expected in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        before = signal.getsignal(number)
        with stoppable() as (stop, code):
            assert code() == 0
            signal.raise_signal(number)
            assert stop.is_set()
            assert code() == expected
            with pytest.raises(AssertionError, match=f"left with {expected}"):
                signal.raise_signal(number)
        assert signal.getsignal(number) is before


def test_an_unexpected_error_exits_1_cause_first_and_loses_no_output() -> None:
    """In a process of its own, as it ends it without clean-up."""
    script = (
        "from draftsmith import cli\nfrom draftsmith.commands import decode\n"
        "def fail(options):\n    print('printed before')\n    raise RuntimeError('the cause')\n"
        "decode._eval = fail\n"
        "cli.main(['eval', '--target', 't', '--draft', 'd', '--prompts', 'p'])\n"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, env=buffered
    )
    assert done.returncode == 1
    assert done.stdout == "printed before\n"
    assert done.stderr.startswith("draftsmith: RuntimeError: the cause\n")
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "No space left on device; free some space, or choose a place that has it",
        ),
        (
            OSError(errno.EACCES, "Permission denied", "x/y"),
            "x/y: Permission denied; choose a place that you may write, or change its permissions",
        ),
        (OSError(errno.EFBIG, "File too large"), "File too large; free some space, or choose a place that has it"),
        (MemoryError(), "out of memory (no further details); ask for less at once, or use a larger machine"),
        (
            RuntimeError("can't\n allocate memory: you tried"),
            "out of memory (can't allocate memory: you tried); ask for less at once, or use a larger machine",
        ),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "the program that read the output has ended"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception,
    said: str,
    run: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(decode, "_eval", _raising(error))
    with pytest.raises(AssertionError, match="left with 1"):
        run("eval", "--target", "t", "--draft", "d", "--prompts", "p")
    assert capsys.readouterr().err == f"draftsmith: {said}\n"


def test_windows_is_refused_with_a_reason(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert "use WSL" in only_line(run("demo"), 2)


def _file(name: str, text: str) -> Path:
    Path(name).write_text(text)
    return Path(name)


def _raising(error: BaseException) -> Callable[[Any], int]:
    def command(options: Any) -> int:
        raise error

    return command


def _demo_drafter() -> Any:
    target = json.loads((embedded.TARGET / "config.json").read_text())
    return tiny_drafter(
        hidden_size=target["hidden_size"],
        vocab_size=target["vocab_size"],
        num_target_layers=target["num_hidden_layers"],
        mask_token_id=2047,
    )
