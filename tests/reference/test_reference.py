"""The reference package `dflash` 0.1.0 loads `draft/` unchanged and accepts, round by round, what we accept."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import environment
from torch import Tensor

from conftest import demo_shape, run_training
from draftsmith import embedded
from draftsmith.config import Config
from draftsmith.data.conversations import read_prompts
from draftsmith.data.template import Renderer
from draftsmith.decode.speculate import speculative_generate
from draftsmith.drafter.checkpoint import save_drafter
from draftsmith.drafter.config import FULL, SLIDING
from draftsmith.drafter.init import random_init
from draftsmith.drafter.loss import HeadScaling
from draftsmith.drafter.model import Drafter
from draftsmith.errors import InputError
from draftsmith.export.convert import export_drafter, import_drafter
from draftsmith.report.session import load_pair
from draftsmith.target.load import Target, TargetSpec

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def reference_python() -> Path:
    """The versions `dflash` 0.1.0 pins."""
    needs = ["torch==2.13.0", "transformers==5.15.0", "tqdm", "jinja2"]
    return environment("DRAFTSMITH_REFERENCE_VENV", "reference-dflash-0.1.0", needs, ["dflash==0.1.0"])


SLIDE_LAST = {"drafter__layer_types": ["full_attention", "sliding_attention"], "drafter__sliding_window": 24}
SLIDE_FIRST = {"drafter__layer_types": ["sliding_attention", "full_attention"], "drafter__sliding_window": 5}


@pytest.mark.parametrize(
    "layers",
    [{}, SLIDE_LAST, SLIDE_FIRST],
    ids=["all full", "mixed", "mixed, window smaller than the block"],
)
def test_acceptance_sequences_are_equal(
    layers: dict[str, Any],
    reference_python: Path,
    demo_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty prompts, greedy, after enough training for drafts to be accepted."""
    result, _, _ = run_training(demo_config(train__steps=40, **layers))
    rounds = compare(reference_python, result.folder / "draft", tmp_path, monkeypatch, prompts=20)
    assert max(rounds) >= 3, "nothing was accepted: the comparison says little"


@pytest.mark.parametrize(
    ("kinds", "is_causal"),
    [((FULL, FULL), True), ((FULL, SLIDING), True), ((SLIDING, FULL), False), ((SLIDING, SLIDING), False)],
)
def test_drafters_that_are_only_evaluated_draft_alike(
    kinds: tuple[str, ...],
    is_causal: bool,
    demo_target: Target,
    reference_python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`is_causal` overrides every layer: taken in for evaluation, refused for servers."""
    drafter = Drafter(replace(demo_shape(demo_target), layer_types=kinds, sliding_window=5, is_causal=is_causal))
    random_init(drafter, 0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)  # large enough for attention to matter
    save_drafter(tmp_path / "theirs", drafter, dtype=torch.float32, provenance={}, card="")
    import_drafter(str(tmp_path / "theirs"), tmp_path / "ours")
    compare(reference_python, tmp_path / "ours", tmp_path, monkeypatch, prompts=4)
    with pytest.raises(InputError, match=f"cannot be exported to zlab: is_causal {is_causal} overrides layer_types"):
        export_drafter(str(tmp_path / "ours"), "zlab", tmp_path / "exported")


def compare(python: Path, draft: Path, work: Path, monkeypatch: pytest.MonkeyPatch, *, prompts: int) -> list[int]:
    """Decodes with both packages from one folder: every draft, every round and every token must be the same.

    Returns the tokens of all rounds.
    """
    target, drafter = load_pair(TargetSpec("demo"), draft, torch.device("cpu"))
    renderer = Renderer(target.tokenizer)
    ids = [renderer.prompt_ids(prompt) for prompt in read_prompts(["demo"])[:prompts]]
    drafts: list[list[int]] = []
    plain = HeadScaling.logits

    def recorded(self: HeadScaling, logits_BV: Tensor) -> Tensor:
        drafts.append(plain(self, logits_BV).argmax(-1).tolist())
        return plain(self, logits_BV)

    monkeypatch.setattr(HeadScaling, "logits", recorded)
    ours = [speculative_generate(target, drafter, prompt, 96) for prompt in ids]
    (work / "prompts.json").write_text(json.dumps(ids))
    arguments = [Path(__file__).with_name("run_reference.py"), embedded.TARGET, draft, work / "prompts.json", "96"]
    done = subprocess.run([python, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert drafts == [tokens for result in theirs for tokens in result["drafts"]]
    assert [list(g.rounds) for g in ours] == [result["rounds"] for result in theirs]
    assert [list(g.tokens) for g in ours] == [result["tokens"] for result in theirs]
    rounds = [count for g in ours for count in g.rounds]
    different = len(set(map(tuple, drafts)))
    print(f"{len(ours)} prompts, {len(rounds)} rounds, {sum(rounds)} tokens, {different} different drafts")
    return rounds
