"""Memory that runs out, refused by the kernel: half as much at once, and the same result."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import run_training
from draftsmith.config import Config
from planted import FRESH_MEMORY, start

MakeConfig = Callable[..., Config]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limit on memory")

TARGET = """
def plant(run):
    calls = iter(range(10**6))

    def before(module, inputs):
        if next(calls) == 0:  # the drafter waits still
            no_more_memory()

    memory_again_with_the_next_line(run)
    target_layer(run).register_forward_pre_hook(before)

go(plant)
"""
DRAFTER = """
def plant(run):
    (worker,) = run.drafters.values()
    calls = iter(range(10**6))

    def before(module, inputs):
        if next(calls) == 6:
            wait_for_targets()
            no_more_memory()

    memory_again_with_the_next_line(run)
    worker.drafter.layers[0].mlp.register_forward_pre_hook(before)

go(plant)
"""


def outcome(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = folder / "checkpoints" / f"step-{len(lines)}" / "drafter.safetensors"
    return [line["loss"] for line in lines], load_file(weights)


@pytest.mark.parametrize(("body", "who"), [(TARGET, "documents"), (DRAFTER, "blocks")], ids=["target", "drafter"])
def test_memory_runs_out_once(demo_config: MakeConfig, tmp_path: Path, body: str, who: str) -> None:
    settings = {"train__steps": 2, "data__row_tokens": 1024, "pipeline__threads": 1, "pipeline__target_batch_rows": 4}
    plain, _, _ = run_training(demo_config(run__dir=str(tmp_path / "plain"), **settings))
    process = start(demo_config(run__dir=str(tmp_path / "short"), **settings), body, tmp_path, **FRESH_MEMORY)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count(f"{who} at once; done in two halves") == 1, out
    losses, weights = outcome(tmp_path / "short")
    expected_losses, expected = outcome(plain.folder)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert all(float((weights[n] - expected[n]).norm() / expected[n].norm()) <= 1e-5 for n in expected)
    assert not (tmp_path / "short" / "bad-rows.jsonl").exists(), "nothing was left out"


BACKWARD = """
def plant(run):
    def before(module, gradients):
        wait_for_targets()
        no_more_memory()

    memory_again_with_the_next_line(run)
    first_drafter(run).layers[0].register_full_backward_pre_hook(before)

go(plant)
"""


def test_memory_that_runs_out_inside_a_backward_stops_the_run(demo_config: MakeConfig, tmp_path: Path) -> None:
    """A part of the gradient was added by then: repeating the row would count it twice."""
    config = demo_config(run__dir=str(tmp_path / "run"), data__row_tokens=2048, pipeline__threads=1)
    process = start(config, BACKWARD, tmp_path, **FRESH_MEMORY)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "\ndraftsmith: out of memory (" in err
    assert "gradient had been added already" in err
    assert "drafter.checkpointing: layer" in err
