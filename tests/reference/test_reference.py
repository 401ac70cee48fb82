"""The reference package `dflash` 0.1.0 loads `draft/` unchanged and accepts, round by round, what we accept."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import run_training
from draftsmith import embedded
from draftsmith.config import Config
from draftsmith.data.conversations import read_prompts
from draftsmith.data.template import Renderer
from draftsmith.decode.speculate import speculative_generate
from draftsmith.report.session import load_pair

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def reference_python() -> Path:
    """A virtual environment with the versions `dflash` 0.1.0 pins, made once in `.cache/`."""
    folder = Path(os.environ.get("DRAFTSMITH_REFERENCE_VENV", ROOT / ".cache" / "reference-dflash-0.1.0"))
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "torch==2.13.0", "transformers==5.15.0", "tqdm", "jinja2"], check=True)
        subprocess.run([*pip, "--no-deps", "dflash==0.1.0"], check=True)
        (folder / "complete").touch()
    return python


@pytest.mark.parametrize(
    "layers",
    [
        {},
        {"drafter__layer_types": ["full_attention", "sliding_attention"], "drafter__sliding_window": 24},
        {"drafter__layer_types": ["sliding_attention", "full_attention"], "drafter__sliding_window": 5},
    ],
    ids=["all full", "mixed", "mixed, window smaller than the block"],
)
def test_acceptance_sequences_are_equal(
    layers: dict[str, Any], reference_python: Path, demo_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Ten prompts, greedy, after enough training for drafts to be accepted."""
    result, _, _ = run_training(demo_config(train__steps=40, **layers))
    target, drafter = load_pair("demo", result.folder / "draft", torch.device("cpu"))
    renderer = Renderer(target.tokenizer)
    prompts = [renderer.prompt_ids(prompt) for prompt in read_prompts(["demo"])[:10]]
    ours = [speculative_generate(target, drafter, ids, 96) for ids in prompts]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    script = Path(__file__).with_name("run_reference.py")
    arguments = [script, embedded.TARGET, result.folder / "draft", tmp_path / "prompts.json", "96"]
    done = subprocess.run([reference_python, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert [list(g.rounds) for g in ours] == [r["rounds"] for r in theirs]
    assert [list(g.tokens) for g in ours] == [r["tokens"] for r in theirs]
    assert max(max(g.rounds) for g in ours) >= 3, "nothing was accepted: the comparison says little"
