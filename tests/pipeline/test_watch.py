"""A run in which nothing moves ends with where it hangs; one that merely waits, or was stopped, does not."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import run_training
from draftsmith.config import Config
from draftsmith.pipeline import watch
from draftsmith.pipeline.checkpoint import Checkpoints
from draftsmith.pipeline.watch import StalledError, Watch, WorkerClock
from planted import start

MakeConfig = Callable[..., Config]

HANGS = """
fifo = Path({fifo!r})
os.mkfifo(fifo)

def plant(run):
    calls = iter(range(10**6))

    def before(module, inputs):
        if next(calls) == 5:
            fifo.read_bytes()  # nobody ever writes

    target_layer(run).register_forward_pre_hook(before)

go(plant)
"""


def test_a_worker_that_hangs_ends_the_run(demo_config: MakeConfig, tmp_path: Path) -> None:
    config = demo_config(run__dir=str(tmp_path / "run"), train__steps=50, pipeline__stall_s=4, checkpoint__every=1)
    process = start(config, HANGS.format(fifo=str(tmp_path / "fifo")), tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "warning: target cpu:0 has made no progress for " in out
    assert "target cpu:0 failed: StalledError: no progress for " in out
    assert "pathlib.py:" in err, "where it hangs"
    assert "abandoned, still busy after 5 s: target cpu:0" in err
    report = json.loads((tmp_path / "run" / "crash-report.json").read_text())
    assert report["worker"] == "target cpu:0"
    assert any("read_bytes" in frame for frame in report["threads"]["target cpu:0"])
    assert report["workers"]["target cpu:0"].startswith("features of rows ")
    assert report["workers"]["drafter cpu:1"].startswith("waiting, for ")
    assert (tmp_path / "run" / "checkpoints" / "step-1" / "manifest.json").is_file()


KILLED = """
def plant(run):
    def kill(thread):
        wait = time.monotonic() + 60
        while not (run.journal.folder / "checkpoints" / "step-1").exists() and time.monotonic() < wait:
            time.sleep(0.01)
        number = ctypes.c_ulong(thread.ident)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit)) == 1

    def find():
        while True:
            for thread in threading.enumerate():
                if thread.name == {name!r}:
                    return kill(thread)

    threading.Thread(target=find, daemon=True).start()

go(plant)
"""


@pytest.mark.parametrize("name", ["target cpu:0", "drafter cpu:1"])
def test_a_thread_that_is_killed_ends_the_run(demo_config: MakeConfig, tmp_path: Path, name: str) -> None:
    config = demo_config(run__dir=str(tmp_path / "run"), train__steps=100_000, checkpoint__every=1)
    process = start(config, KILLED.format(name=name), tmp_path)
    out, err = process.communicate(timeout=120)
    assert f"{name} failed: KilledError: the thread was ended by SystemExit" in out
    assert process.returncode == 1, err
    assert Checkpoints(tmp_path / "run" / "checkpoints", 3).latest(pytest.fail) is not None


CRASHES = """
def plant(run):
    calls = iter(range(10**6))

    def before(module, inputs):
        if next(calls) == 5:
            {crash}

    target_layer(run).register_forward_pre_hook(before)

go(plant)
"""


def test_a_fatal_signal_leaves_its_stacks(demo_config: MakeConfig, tmp_path: Path) -> None:
    """Native code that crashes: the next attempt makes a report of what Python's handler wrote."""
    config = demo_config(run__dir=str(tmp_path / "run"), checkpoint__every=1)
    process = start(config, CRASHES.format(crash="ctypes.string_at(0)"), tmp_path)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGSEGV
    process = start(config, "go(lambda run: os._exit(7), '--resume')", tmp_path)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 7
    assert "warning: the attempt before was ended by a fatal error in native code: Fatal Python error" in out
    report = json.loads((tmp_path / "run" / "crash-report.json").read_text())
    assert any("in before" in line for line in report["stacks"])
    result, _, _ = run_training(config, resume=True)
    assert result.finished
    assert not {"crash-report.json", "fatal-stacks.txt"} & set(os.listdir(tmp_path / "run"))


def test_an_attempt_that_was_killed_is_told_of(demo_config: MakeConfig, tmp_path: Path) -> None:
    config = demo_config(run__dir=str(tmp_path / "run"), checkpoint__every=1)
    process = start(config, CRASHES.format(crash="os.kill(os.getpid(), 9)"), tmp_path)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    result, quiet, _ = run_training(config, resume=True)
    assert result.finished
    assert sum("the attempt before ended without a word" in line for line in quiet.lines) == 1


def looks(watcher: Watch, seconds: float) -> list[StalledError]:
    """What `look` found, asked every tenth of a second."""
    found = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.1)
        if (failure := watcher.look()) is not None:
            assert isinstance(failure.error, StalledError)
            found.append(failure.error)
    return found


def test_waiting_for_one_that_works_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"target": WorkerClock(), "drafter": WorkerClock()}
    watcher = Watch(clocks, 0.5, lambda line: None)
    for number in range(8):
        with clocks["target"].busy(f"row {number}"):
            assert not looks(watcher, 0.15)


def test_signs_of_life_count_and_all_waiting_is_a_stall() -> None:
    lines: list[str] = []
    clocks = {"target": WorkerClock(), "drafter": WorkerClock()}
    watcher = Watch(clocks, 0.5, lines.append)
    with clocks["drafter"].aside("evaluation"):
        for _ in range(6):
            clocks["drafter"].beat("evaluation")
            assert not looks(watcher, 0.2)
    assert not lines
    (error, *_) = looks(watcher, 1)
    assert "all workers wait for each other" in str(error)
    assert len(lines) == 1


def test_a_process_that_was_stopped_has_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z for an hour: a look counts for two polls at most, whatever the clock says."""
    clocks = {"target": WorkerClock()}
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    watcher = Watch(clocks, 10, lambda line: None)
    with clocks["target"].busy("a row"):
        assert watcher.look() is None
        now[0] += 3600
        assert watcher.look() is None
        now[0] += 1
        assert watcher.look() is None
