"""Killed at any instant and resumed, a run ends with the bits of one that was never killed, and nothing lies around."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith import embedded
from draftsmith.files import file_hash

KILLED = Path(__file__).with_name("killed.py")
KILLS, SEED, STEPS, EVALUATED, SAVED = 50, 8, 36, 4, 3


def test_a_kill_at_every_step_on_the_disk_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Without training: a child is killed in the middle of a file, and before each open, rename, removal and fsync."""
    done = subprocess.run(
        [sys.executable, str(KILLED), "all", str(tmp_path / "cases")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    steps: dict[str, list[str]] = json.loads(done.stdout)
    assert {name: len(found) > 9 for name, found in steps.items()} == dict.fromkeys(steps, True)
    for name, found in steps.items():
        check_order(name, found)


def check_order(name: str, steps: list[str]) -> None:
    """A kill leaves what the kernel has; what a power failure leaves depends on the order of making things durable."""
    shown = max(n for n, step in enumerate(steps) if step.startswith("os.rename .") and ".new" in step)
    aside = steps[shown].removeprefix("os.rename ")
    written = {step.removeprefix("open ") for step in steps[:shown] if step.startswith(f"open {aside}")}
    durable = {step.removeprefix("fsync ") for step in steps[:shown] if step.startswith("fsync ")}
    assert written == durable, f"{name}: shown before it was durable"
    (known,) = [n for n, step in enumerate(steps) if step == "fsync ."]
    removals = [n for n, step in enumerate(steps) if step.startswith("os.rmdir")]
    assert shown < known, f"{name}: never made durable"
    assert all(known < n for n in removals), f"{name}: the old one was deleted before the new one was durable"


@dataclass(frozen=True)
class Life:
    """A run that was never killed: its folder, and how long its process lived, fresh or forked."""

    folder: Path
    seconds: dict[bool, float]
    phases: Counter[str] = field(default_factory=Counter)  # in which the random kills fell


def write_config(place: Path, data: Path) -> None:
    """Small, with all that a run does: checkpoints, evaluations that write `best/`, the export at the end."""
    config: dict[str, Any] = yaml.safe_load(embedded.CONFIG.read_text())
    config["run"] = {"dir": "run"}
    config["topology"] = "1+1"
    config["data"] |= {"train": [str(data)], "row_tokens": 256}
    config["drafter"] |= {"layers": 1}
    config["train"] |= {"steps": STEPS, "rows_per_step": 1}
    config["pipeline"] = {"threads": 1}
    config["checkpoint"] = {"every": SAVED, "keep": 2}
    config["eval"] = {"every": EVALUATED, "limit": 2, "max_new_tokens": 8}
    place.mkdir()
    (place / "c.yaml").write_text(yaml.safe_dump(config))


class Runs:
    """Runs `draftsmith train` in processes of their own.

    A fresh interpreter spends most of a small run's life with imports, before it could do any harm. So most runs are
    forked from a process that has imported the program and has done nothing else; `fresh` ones start from nothing.
    """

    def __init__(self) -> None:
        self._nurse = subprocess.Popen(
            [sys.executable, str(KILLED), "nurse"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._fresh: dict[int, subprocess.Popen[str]] = {}

    def start(self, place: Path, *, fresh: bool = False, until: str = "") -> int:
        """Starts or resumes the run of a folder; `until`: it kills itself before this step on the disk."""
        words = ["train", "c.yaml", *(["--resume"] if (place / "run").exists() else [])]
        if not fresh:
            return self._ask("start", str(place), until, words)
        command = [sys.executable, "-c", "import sys; from draftsmith.cli import main; sys.exit(main())", *words]
        with (place / "log").open("a") as log:
            process = subprocess.Popen(command, cwd=place, stdout=log, stderr=log, text=True)
        self._fresh[process.pid] = process
        return process.pid

    def wait(self, number: int) -> int:
        """Exit code of a run, or minus the signal that ended it."""
        fresh = self._fresh.pop(number, None)
        return fresh.wait() if fresh else self._ask("wait", number)

    def close(self) -> None:
        assert self._nurse.stdin is not None
        self._nurse.stdin.close()
        self._nurse.wait()

    def _ask(self, *question: Any) -> int:
        assert self._nurse.stdin is not None
        assert self._nurse.stdout is not None
        print(json.dumps(question), file=self._nurse.stdin, flush=True)
        return int(self._nurse.stdout.readline())


@pytest.fixture(scope="session")
def runs() -> Iterator[Runs]:
    made = Runs()
    yield made
    made.close()


@pytest.fixture(scope="session")
def life(runs: Runs, tmp_path_factory: pytest.TempPathFactory, some_conversations: Path) -> Iterator[Life]:
    place = tmp_path_factory.mktemp("life")
    seconds = {}
    for fresh in (True, False):
        folder = place / ("fresh" if fresh else "forked")
        write_config(folder, some_conversations)
        began = time.monotonic()
        assert runs.wait(runs.start(folder, fresh=fresh)) == 0, (folder / "log").read_text()
        seconds[fresh] = time.monotonic() - began
    found = Life(place / "fresh" / "run", seconds)
    assert differences(found.folder, place / "forked" / "run") == []
    yield found
    print(f"\nrandom kills by phase: {dict(found.phases.most_common())}")


def differences(whole: Path, other: Path) -> list[str]:
    """In what a run's folder differs from another: everything in it counts but times."""
    found = []
    for name, one, two in (
        ("files", content(whole), content(other)),
        ("metrics", record(whole), record(other)),
    ):
        if one != two:
            keys = [key for key in {**one, **two} if one.get(key) != two.get(key)]
            found.append(f"{name}: {keys}")
    return found


def content(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "metrics.jsonl"]
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    hashes = {path.relative_to(folder).as_posix(): file_hash(path) for path in paths}
    return hashes | {path.relative_to(folder).as_posix(): "a folder" for path in folders}


def record(folder: Path) -> dict[int, Any]:
    """Lines of the record by their place, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return dict(
        enumerate({k: v for k, v in line.items() if k not in ("time", "step_s", "tokens_per_s")} for line in lines)
    )


def phase(folder: Path) -> str:
    """What a run was doing when it was killed, as far as its folder tells."""
    asides = {
        path.name.split(".")[1].partition("-")[0] for path in folder.rglob(".*") if path.suffix in (".new", ".old")
    }
    for name, what in (("step", "saving a checkpoint"), ("best", "saving best/"), ("draft", "exporting draft/")):
        if name in asides:
            return what
    if not folder.exists():
        return "before its folder was there"
    if not (folder / "metrics.jsonl").exists():
        return "starting up"
    lines = (folder / "metrics.jsonl").read_bytes().count(b"\n")
    if lines == STEPS:
        return "finished" if (folder / "draft").exists() else "after the last step"
    if (lines + 1) % EVALUATED == 0:
        return "in a step that is evaluated"
    return "between checkpoints" if (folder / "checkpoints").exists() else "before the first checkpoint"


def finish(place: Path, runs: Runs, life: Life) -> None:
    """Resumes to the end, and compares."""
    assert runs.wait(runs.start(place)) == 0, (place / "log").read_text()
    assert differences(life.folder, place / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_random_and_resumed_equals_never_killed(
    number: int, runs: Runs, life: Life, tmp_path: Path, some_conversations: Path
) -> None:
    """SIGKILL at an instant drawn from the whole life of the process, every fifth time a fresh one with its imports. A
    third of the resumed runs is killed again."""
    draw = random.Random(SEED * 1000 + number)
    place = tmp_path / "cut"
    write_config(place, some_conversations)
    fresh = number % 5 == 0
    while True:
        process = runs.start(place, fresh=fresh)
        time.sleep(draw.uniform(0, life.seconds[fresh]))
        os.kill(process, signal.SIGKILL)
        assert runs.wait(process) in (0, -signal.SIGKILL)
        life.phases[phase(place / "run")] += 1
        if draw.random() > 1 / 3:
            break
    finish(place, runs, life)


WAYS = {  # the n-th step on the disk that begins so
    "start-up, before anything is written": "1 os.mkdir .",
    "start-up, the config not durable": "1 fsync .config.yaml.new/config.yaml",
    "start-up, the config not shown": "1 os.rename .config.yaml.new/config.yaml",
    "start-up, the record not begun": "1 open metrics.jsonl",
    "in the first evaluation": "1 evaluate",
    "in a later evaluation": "3 evaluate",
    "the first best/, not shown": "1 os.rename .best.new",
    "a later best/, its weights": "2 open .best.new/model.safetensors",
    "a later best/, the old one away, the new one not there": "2 os.rename .best.new",
    "the first checkpoint, its first file": "1 open checkpoints/.step-3.new/drafter.safetensors",
    "a checkpoint, its last file": "1 open checkpoints/.step-6.new/manifest.json",
    "a checkpoint, not durable": "1 fsync checkpoints/.step-12.new/optimizer.safetensors",
    "a checkpoint, not shown": "1 os.rename checkpoints/.step-12.new",
    "an old checkpoint, still there": "1 os.rename checkpoints/step-6",
    "an old checkpoint, half gone": "1 os.remove optimizer.safetensors",
    "the last checkpoint, not shown": f"1 os.rename checkpoints/.step-{STEPS}.new",
    "draft/, its weights": "1 open .draft.new/model.safetensors",
    "draft/, not shown": "1 os.rename .draft.new",
    "draft/, shown": "1 os.remove .draft.old",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_a_chosen_step_and_resumed_equals_never_killed(
    way: str, runs: Runs, life: Life, tmp_path: Path, some_conversations: Path
) -> None:
    """The rare instants, each hit for certain."""
    place = tmp_path / "cut"
    write_config(place, some_conversations)
    assert runs.wait(runs.start(place, until=WAYS[way])) == -signal.SIGKILL
    finish(place, runs, life)
