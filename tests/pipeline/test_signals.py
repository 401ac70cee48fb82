"""The command as a process: killed, interrupted, resumed."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.config import Config, dump_config

DRAFTSMITH = [sys.executable, "-c", "import sys; from draftsmith.cli import main; sys.exit(main())"]


def start(config: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*DRAFTSMITH, "train", str(config), *more], stderr=subprocess.PIPE, text=True)


def wait_for_steps(folder: Path, steps: int, process: subprocess.Popen[str]) -> None:
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
            return
        time.sleep(0.01)
    pytest.fail(f"no {steps} steps in time: {process.communicate()[1]}")


@pytest.fixture
def write(demo_config: Callable[..., Config], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def make(name: str, **changes: object) -> tuple[Path, Path]:
        config = demo_config(run__dir=str(tmp_path / name), **changes)
        path = tmp_path / f"{name}.yaml"
        path.write_text(dump_config(config, []))
        return path, tmp_path / name

    return make


@pytest.mark.parametrize(("steps", "kept"), [pytest.param(40, 21, marks=pytest.mark.slow), (14, 7)])
def test_killed_and_resumed_equals_never_killed(write: Callable[..., tuple[Path, Path]], steps: int, kept: int) -> None:
    """SIGKILL after half of the steps: bit-identical weights; the record goes on where the checkpoint stood."""
    settings = {
        "train__steps": steps,
        "checkpoint__every": 7,
        "eval__every": steps // 4,
        "eval__limit": 1,
        "eval__max_new_tokens": 32,
    }
    config, whole = write("whole", **settings)
    assert start(config).wait() == 0
    config, cut = write("cut", **settings)
    process = start(config)
    wait_for_steps(cut, kept + 1, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = (cut / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    resumed = start(config, "--resume")
    assert resumed.wait() == 0
    after = (cut / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert after[:kept] == before[:kept], "lines up to the checkpoint are kept byte for byte"
    assert [json.loads(line)["step"] for line in after] == list(range(1, steps + 1))
    for folder in (f"checkpoints/step-{steps}", "draft", "best"):
        name = "drafter.safetensors" if folder.startswith("checkpoints") else "model.safetensors"
        ours, expected = load_file(cut / folder / name), load_file(whole / folder / name)
        assert all(torch.equal(ours[key], expected[key]) for key in expected), folder
    assert all(
        json.loads(a)["loss"] == json.loads(b)["loss"]
        for a, b in zip(after, (whole / "metrics.jsonl").read_bytes().splitlines(), strict=True)
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_exits(write: Callable[..., tuple[Path, Path]], number: int, code: int) -> None:
    config, folder = write("run", train__steps=100000)
    process = start(config)
    wait_for_steps(folder, 2, process)
    process.send_signal(number)
    assert process.wait(30) == code
    (saved,) = (folder / "checkpoints").iterdir()
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert saved.name == f"step-{last}"
    assert (folder / "draft" / "model.safetensors").is_file()


def test_ctrl_c_saves_though_the_reader_of_the_output_has_gone(write: Callable[..., tuple[Path, Path]]) -> None:
    """`train | tee log`: Ctrl-C ends tee, too. The end of tee alone does not stop a run."""
    config, folder = write("run", train__steps=100000, checkpoint__every=1)  # each step prints a line
    read, written = os.pipe()
    process = subprocess.Popen([*DRAFTSMITH, "train", str(config)], stdout=written, stderr=written)
    os.close(written)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        os.read(read, 4096)
    os.close(read)
    seen = metrics.read_bytes().count(b"\n")
    while time.monotonic() < deadline and metrics.read_bytes().count(b"\n") < seen + 3:
        assert process.poll() is None, "training went on"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) in (1, 130)  # 1: its last words found no reader
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert (folder / "checkpoints" / f"step-{last}" / "manifest.json").is_file()
    assert (folder / "draft" / "model.safetensors").is_file()


@pytest.mark.parametrize(("streams", "code"), [(">&- 2>&-", 0), (">&-", 0)])
def test_closed_streams_are_no_fault(write: Callable[..., tuple[Path, Path]], streams: str, code: int) -> None:
    config, folder = write("run", train__steps=1)
    command = shlex.join([*DRAFTSMITH, "train", str(config)])
    assert subprocess.run(["sh", "-c", f"{command} {streams}"], check=False).returncode == code
    assert (folder / "draft" / "model.safetensors").is_file()


def test_a_failing_worker_ends_the_process(write: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """Cause first, within six seconds, exit code 1, last checkpoint whole."""
    config, folder = write("run", train__steps=1000, checkpoint__every=2)
    plant = (
        "import sys\n"
        "from draftsmith.cli import main\n"
        "from draftsmith.pipeline.workers import DrafterWorker\n"
        "forward = DrafterWorker.forward\n"
        "def failing(self, features, blocks):\n"
        "    if features.row.index == 13: raise MemoryError('planted')\n"
        "    return forward(self, features, blocks)\n"
        "DrafterWorker.forward = failing\n"
        f"sys.exit(main(['train', {str(config)!r}]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", plant], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(folder, 3, process)
    began = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 6
    assert process.returncode == 1
    assert "drafter cpu:1 failed: MemoryError: planted" in out
    assert err.startswith("draftsmith: out of memory (planted)")
    assert (folder / "checkpoints" / "step-2" / "manifest.json").is_file()
