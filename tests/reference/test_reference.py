"""The reference package `dflash` 0.1.0 loads `draft/` unchanged and accepts, round by round, what we accept."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import environment

from conftest import run_training
from draftsmith import embedded
from draftsmith.config import Config
from draftsmith.data.conversations import read_prompts
from draftsmith.data.template import Renderer
from draftsmith.decode.speculate import speculative_generate
from draftsmith.errors import InputError
from draftsmith.export.convert import export_drafter, import_drafter
from draftsmith.report.session import load_pair

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
    layers: dict[str, Any], reference_python: Path, demo_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Twenty prompts, greedy, after enough training for drafts to be accepted."""
    result, _, _ = run_training(demo_config(train__steps=40, **layers))
    compare(reference_python, result.folder / "draft", tmp_path, prompts=20)


@pytest.mark.parametrize(
    ("layers", "is_causal"),
    [({}, True), (SLIDE_LAST, True), (SLIDE_FIRST, False)],
    ids=["full and causal", "mixed, all causal", "mixed, none causal"],
)
def test_drafters_that_are_only_evaluated_decode_alike(
    layers: dict[str, Any],
    is_causal: bool,
    reference_python: Path,
    demo_config: Callable[..., Config],
    tmp_path: Path,
) -> None:
    """`is_causal` overrides every layer: taken in for evaluation, refused for servers."""
    result, _, _ = run_training(demo_config(train__steps=40, **layers))
    path = result.folder / "draft" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_causal": is_causal}))
    import_drafter(str(path.parent), tmp_path / "imported")
    compare(reference_python, tmp_path / "imported", tmp_path, prompts=5)
    with pytest.raises(InputError, match=f"cannot be exported to zlab: is_causal {is_causal} overrides layer_types"):
        export_drafter(str(path.parent), "zlab", tmp_path / "exported")


def compare(python: Path, draft: Path, work: Path, *, prompts: int) -> None:
    """Decodes with both packages from one folder: the same tokens, round by round."""
    target, drafter = load_pair("demo", draft, torch.device("cpu"))
    renderer = Renderer(target.tokenizer)
    ids = [renderer.prompt_ids(prompt) for prompt in read_prompts(["demo"])[:prompts]]
    ours = [speculative_generate(target, drafter, prompt, 96) for prompt in ids]
    (work / "prompts.json").write_text(json.dumps(ids))
    arguments = [Path(__file__).with_name("run_reference.py"), embedded.TARGET, draft, work / "prompts.json", "96"]
    done = subprocess.run([python, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert [list(g.rounds) for g in ours] == [r["rounds"] for r in theirs]
    assert [list(g.tokens) for g in ours] == [r["tokens"] for r in theirs]
    rounds = [count for g in ours for count in g.rounds]
    print(f"{len(ours)} prompts, {len(rounds)} rounds, {sum(rounds)} tokens, tau {sum(rounds) / len(rounds):.3f}")
    assert max(rounds) >= 3, "nothing was accepted: the comparison says little"
