"""Starting from a drafter that somebody published: every weight, or a refusal that says what differs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import demo_shape, run_training
from draftsmith.config import Config
from draftsmith.drafter import checkpoint
from draftsmith.drafter.checkpoint import find_drafter, load_drafter, save_drafter
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.init import random_init
from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError, InputError
from draftsmith.pipeline.machine import this_machine
from draftsmith.pipeline.plan import make_plan
from draftsmith.pipeline.prepare import prepare
from draftsmith.target.load import Target

MakeConfig = Callable[..., Config]


def published(folder: Path, target: Target, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A drafter folder with random weights; `changes` go into its shape."""
    from dataclasses import replace

    drafter = Drafter(replace(demo_shape(target), **changes))
    random_init(drafter, 7)
    save_drafter(folder, drafter, dtype=dtype, provenance={}, card="")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_starts_with_the_published_weights(
    demo_config: MakeConfig, demo_target: Target, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = published(tmp_path / "d", demo_target, dtype)
    job = prepare(demo_config(drafter__init=str(folder)))
    expected = load_drafter(folder, torch.device("cpu")).state_dict()
    ours = job.drafter.state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert all(tensor.dtype == torch.float32 for tensor in ours.values())
    assert f"drafter start: {folder} (warm start, {len(expected)} tensors)" in map(str, job.decisions)


def test_what_a_run_leaves_can_be_started_from(demo_config: MakeConfig, tmp_path: Path) -> None:
    first, _, _ = run_training(demo_config(run__dir=str(tmp_path / "first")))
    draft = first.folder / "draft"
    job = prepare(demo_config(drafter__init=str(draft)))
    expected = load_drafter(draft, torch.device("cpu")).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in job.drafter.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (1, 3, 4, 6, 7)}, r"its target_layer_ids is \(1, 3, 4, 6, 7\), this run's is \(1, 2, 4"),
        ({"block_size": 16}, "its block_size is 16, this run's is 8; set the drafter section to match"),
        ({"mask_token_id": 9}, "its mask_token_id is 9, this run's is 5"),
        ({"layer_types": ("full_attention",)}, "its layer_types is"),
        ({"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 9}, "its layer_types is"),
        ({"intermediate_size": 100}, r"layers\.0\.mlp\.\w+\.weight is \(\d+, \d+\), this config needs"),
        ({"attention_bias": True}, "tensors 8 unknown"),
        ({"is_causal": True}, "its is_causal is True; such a drafter can be evaluated, not trained"),
    ],
)
def test_a_drafter_that_does_another_job_is_refused(
    demo_config: MakeConfig, demo_target: Target, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = published(tmp_path / "d", demo_target, **changes)
    with pytest.raises(InputError, match=message) as caught:
        prepare(demo_config(drafter__init=str(folder)))
    assert str(caught.value).startswith(f"drafter.init {folder}: ")
    assert "\n" not in str(caught.value)


def test_a_plan_checks_it_without_its_weights(demo_config: MakeConfig, demo_target: Target, tmp_path: Path) -> None:
    folder = published(tmp_path / "d", demo_target)
    (folder / "model.safetensors").unlink()
    plan = make_plan(demo_config(drafter__init=str(folder)), this_machine())
    assert f"drafter start: {folder} (warm start, its config matches)" in map(str, plan.decisions)
    other = published(tmp_path / "other", demo_target, block_size=16)
    with pytest.raises(ConfigError, match="block_size is 16"):
        make_plan(demo_config(drafter__init=str(other)), this_machine())


def test_a_hub_id_is_downloaded(
    demo_config: MakeConfig, demo_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, asked = published(tmp_path / "hub", demo_target), []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert revision is None
        asked.append((name, allow_patterns))
        return str(shutil.copytree(hub, tmp_path / f"cache-{len(asked)}"))

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    job = prepare(demo_config(drafter__init="z-lab/Qwen3-4B-DFlash"))
    make_plan(demo_config(drafter__init="z-lab/Qwen3-4B-DFlash"), this_machine())
    assert asked == [
        ("z-lab/Qwen3-4B-DFlash", ["config.json", "model.safetensors", "draftsmith.json", "mask_embedding.pt"]),
        ("z-lab/Qwen3-4B-DFlash", ["config.json"]),
    ]
    assert job.drafter.config.block_size == DrafterConfig.read(hub).block_size
    assert "drafter start: z-lab/Qwen3-4B-DFlash (warm start" in "\n".join(map(str, job.decisions))


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a/b").mkdir(parents=True)
    assert find_drafter("a/b") == Path("a/b")


def test_offline_a_hub_id_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="the hub does not give it") as caught:
        find_drafter("nobody/nothing")
    assert "\n" not in str(caught.value)
    assert "download it and give its folder" in str(caught.value)
    for name in ("nowhere", "./no/where", "/no/where", "a/b/c"):
        with pytest.raises(ConfigError, match="give target, random, or an existing drafter folder or hub id"):
            find_drafter(name)
