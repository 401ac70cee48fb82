"""The disk under a run: full, limited, read-only, out of handles, shared, of another version. Training goes on while it
can, every step stands in the record once, and what is refused is one line.
"""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import Quiet, run_training
from draftsmith import __version__, cli
from draftsmith.config import Config, dump_config
from draftsmith.errors import ConfigError
from draftsmith.files import file_hash
from draftsmith.pipeline import journal, workers
from draftsmith.pipeline.checkpoint import Checkpoints
from draftsmith.pipeline.metrics import StepLog
from draftsmith.pipeline.trainer import train
from faults import handles, largest_file, no_handles, read_only, small_disk

MakeConfig = Callable[..., Config]
Fault = Callable[[Path], AbstractContextManager[None]]
STEPS, FILLED, FREED = 10, 4, 7


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Another program takes all the room that is left, and gives it back."""
    filler = folder.parent / "filler"
    fill_up(filler)
    yield
    filler.unlink()


def fill_up(path: Path) -> None:
    """Makes a file longer until the disk takes not a byte more."""
    with path.open("ab", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


@contextmanager
def file_limit(folder: Path) -> Iterator[None]:
    with largest_file(folder.joinpath("metrics.jsonl").stat().st_size + 200):  # half a line
        yield


@contextmanager
def handle_limit(folder: Path) -> Iterator[None]:
    with no_handles():
        yield


class Planted(Quiet):
    """Plants a fault while a step is told, and takes it away three steps later."""

    def __init__(self, folder: Path, fault: Fault) -> None:
        super().__init__()
        self.folder, self.fault, self.planted = folder, fault, ExitStack()
        self.meanwhile: list[bytes] = []  # lines of the record before it could be written again

    def step(self, record: Any, tau: float | None) -> None:
        super().step(record, tau)
        if record.step == FILLED:
            self.planted.enter_context(self.fault(self.folder))
        if record.step == FREED:
            self.planted.close()
            self.meanwhile = (self.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)


@pytest.fixture
def short(demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> MakeConfig:
    """Ten steps, a checkpoint every three, evaluations after four (the best) and eight."""

    def make(folder: Path, **changes: Any) -> Config:
        taus = iter([2.0, 1.0])
        monkeypatch.setattr(journal, "decoded_tau", lambda *a: next(taus))
        size = {"train__rows_per_step": 1, "drafter__layers": 1, "train__steps": STEPS}
        saves = {"checkpoint__every": 3, "eval__every": 4}
        return demo_config(run__dir=str(folder), **(size | saves | changes))

    return make


@contextmanager
def plain_folder(place: Path, nbytes: int) -> Iterator[Path]:
    place.mkdir()
    yield place


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last_weights(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step}" / "drafter.safetensors")


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if path.suffix in (".new", ".old")]


@pytest.mark.parametrize(
    ("place", "fault", "cause"),
    [
        (small_disk, full_disk, "No space left on device; free some space"),
        (plain_folder, file_limit, "File too large; free some space"),
        (plain_folder, handle_limit, r"Too many open files; allow more open files \(ulimit -n\)"),
    ],
)
def test_what_cannot_be_saved_waits_while_training_goes_on(
    place: Any, fault: Fault, cause: str, short: MakeConfig, tmp_path: Path
) -> None:
    calm, _, _ = run_training(short(tmp_path / "calm"))
    with place(tmp_path / "disk", 40 * 2**20) as disk:
        folder = disk / "run"
        quiet = Planted(folder, fault)
        with quiet.planted:
            result = train(
                short(folder), resume=False, stop=threading.Event(), listener=lambda run: quiet, log=quiet.log
            )
        assert result.finished
        assert steps_of(folder) == list(range(1, STEPS + 1))
        assert all(line.endswith(b"}\n") for line in quiet.meanwhile), "a line was torn"
        assert Checkpoints(folder / "checkpoints", 3).steps() == [7, 9, 10], (
            "saved at the next step, not the next ninth"
        )
        assert same_bits(last_weights(folder), last_weights(calm.folder))
        assert files_of(folder / "best") == files_of(calm.folder / "best"), "the best weights were kept meanwhile"
        assert not leftovers(folder)
    warnings = [line for line in quiet.lines if "could not be saved:" in line]
    assert [line.split()[2] for line in warnings] == ["4", "6"], "said when it began, and when a save fell due"
    for line in warnings:
        assert re.search(
            f"could not be saved: {folder}/[^ ]*: {cause}.*; training goes on, and saving is tried again", line
        )
    (saved,) = [line for line in quiet.lines if line.endswith("is saved now")]
    assert saved == "step 7: all that could not be saved before is saved now"


def test_a_run_whose_end_finds_no_room_fails_and_can_be_finished(
    short: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No checkpoint ever fits. Exit 1, one line, nothing in half; with room, `--resume` ends as if nothing had been."""
    (tmp_path / "c.yaml").write_text(dump_config(short(tmp_path / "run", eval__every=0), []))
    with largest_file(50_000):
        assert cli.main(["train", str(tmp_path / "c.yaml")]) == 1
    said = capsys.readouterr()
    assert re.search(
        r"draftsmith: step 10 could not be saved: \S+/run/checkpoints/step-10: File too large; free some space, or "
        r"choose a place that has it, then go on with --resume \(from the start\)\n$",
        said.err,
    )
    assert said.out.count("warning: step") == 3
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    assert not list((tmp_path / "run").glob("checkpoints/*")), "nothing was half written"
    assert not (tmp_path / "run" / "draft").exists()
    assert not leftovers(tmp_path / "run")
    calm, _, _ = run_training(short(tmp_path / "calm", eval__every=0))
    assert cli.main(["train", str(tmp_path / "c.yaml"), "--resume"]) == 0
    assert same_bits(last_weights(tmp_path / "run"), last_weights(calm.folder))


def test_an_output_that_finds_no_room_does_not_end_the_run(
    short: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`draftsmith train > log` on a disk that fills up: the run is saved whole, and the exit code tells of the log."""
    (tmp_path / "c.yaml").write_text(dump_config(short(tmp_path / "run"), []))
    monkeypatch.setattr("os._exit", sys.exit)
    with small_disk(tmp_path / "disk", 65536) as disk, ExitStack() as filled:

        def evaluate(*given: Any) -> float:
            filled.enter_context(full_disk(disk / "log"))
            fill_up(disk / "log")  # also the page that the log has begun
            return 2.0

        monkeypatch.setattr(journal, "decoded_tau", evaluate)
        with (disk / "log").open("a") as log:
            monkeypatch.setattr(sys, "stdout", log)
            with pytest.raises(SystemExit, match="1"):
                cli.main(["train", str(tmp_path / "c.yaml"), "--set", "eval.every=6"])
            monkeypatch.undo()
            filled.close()
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    assert Checkpoints(tmp_path / "run" / "checkpoints", 3).steps()[-1] == STEPS
    assert (tmp_path / "run" / "draft" / "model.safetensors").is_file()
    said = capsys.readouterr().err
    assert "draftsmith: standard output: No space left on device; free some space" in said
    assert "Traceback" not in said


def test_lines_that_cannot_be_written_wait_in_order(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl", 0)
    lines = [{"step": step, "text": "x" * 50} for step in range(1, 6)]
    log.add(lines[0])
    log.write()
    for line in lines[1:4]:
        log.add(line)
        with largest_file(100), pytest.raises(OSError, match=r"File too large: '.*metrics\.jsonl'"):
            log.write()
        assert (tmp_path / "metrics.jsonl").read_text() == json.dumps(lines[0]) + "\n"
    log.add(lines[4])
    log.write()
    log.close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == lines
    again = StepLog(tmp_path / "metrics.jsonl", 3)
    again.add({"step": 4})
    again.write()
    again.close()
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_a_run_directory_that_cannot_be_written_exits_2(
    short: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "file").write_text("mine")
    for name, said in (
        ("place/run", "cannot be written: (Read-only file system|Permission denied); choose another"),
        ("file", "is a file; choose another name"),
        ("file/run", "cannot be written: Not a directory; choose another"),
    ):
        (tmp_path / "c.yaml").write_text(dump_config(short(tmp_path / name), []))
        capsys.readouterr()
        with read_only(tmp_path / "place"):
            assert cli.main(["train", str(tmp_path / "c.yaml")]) == 2
        assert re.fullmatch(f"draftsmith: run.dir {tmp_path}/{name} {said}\n", capsys.readouterr().err)
    assert (tmp_path / "file").read_text() == "mine"
    assert not list((tmp_path / "place").iterdir())


def test_a_run_directory_that_became_read_only_is_not_resumed(short: MakeConfig, tmp_path: Path) -> None:
    config = short(tmp_path / "run")
    run_training(config)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with read_only(tmp_path / "run"), pytest.raises(ConfigError, match=r"cannot be written: (Read-only|Permission)"):
        run_training(config, resume=True)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_training_leaves_no_file_open(short: MakeConfig, tmp_path: Path) -> None:
    run_training(short(tmp_path / "first", features="disk"))  # what libraries open once
    before = handles()
    result, _, _ = run_training(short(tmp_path / "second", features="disk", checkpoint__every=1))
    assert result.finished
    assert handles() == before


def test_a_clock_that_jumps_back_changes_nothing(
    short: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, _, _ = run_training(short(tmp_path / "calm"))
    now, back = time.time(), iter(range(0, 10**9, 3600))
    monkeypatch.setattr(time, "time", lambda: now - next(back))
    result, quiet, _ = run_training(short(tmp_path / "run"))
    assert same_bits(last_weights(result.folder), last_weights(calm.folder))
    records = [record for record, _ in quiet.records]
    assert all(record.step_s > 0 and record.tokens_per_s > 0 for record in records)
    assert all(later.time < earlier.time for earlier, later in pairwise(records)), "it did jump"


def test_nothing_that_decides_asks_the_clock_on_the_wall() -> None:
    """The time of day stands in records (a step, a compilation) and in ages that are shown; nothing else asks it."""
    source = Path(workers.__file__).parents[1]
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"time\.time\(|datetime\.now|date\.today|time_ns\(", path.read_text())
    }
    assert found == {"pipeline/workers.py", "compile/cache.py", "report/cache.py"}


HOLDER = """
import sys
from pathlib import Path
from draftsmith.files import lock_folder
with lock_folder(Path(sys.argv[1]), "run.dir"):  # as a run does, without its imports
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_in_one_directory_are_refused(
    short: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock is the kernel's: kill -9 leaves none."""
    (tmp_path / "c.yaml").write_text(dump_config(short(tmp_path / "run"), []))
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for resume in ([], ["--resume"]):
            assert cli.main(["train", str(tmp_path / "c.yaml"), *resume]) == 2
            assert re.fullmatch(
                f"draftsmith: run.dir {tmp_path}/run is in use by another draftsmith process; wait for its end, or "
                "choose another\n",
                capsys.readouterr().err,
            )
        holder.kill()
    assert cli.main(["train", str(tmp_path / "c.yaml")]) == 0


def rewrite_state(folder: Path, **changes: Any) -> None:
    """A state of another version, with its checksum."""
    state = json.loads((folder / "state.json").read_text()) | changes
    (folder / "state.json").write_text(json.dumps({key: value for key, value in state.items() if value is not None}))
    sums = json.loads((folder / "manifest.json").read_text()) | {"state.json": file_hash(folder / "state.json")}
    (folder / "manifest.json").write_text(json.dumps(sums))


def test_a_checkpoint_of_another_format_is_refused_and_left_alone(short: MakeConfig, tmp_path: Path) -> None:
    config = short(tmp_path / "run")
    run_training(config)
    newest = tmp_path / "run" / "checkpoints" / "step-10"
    assert json.loads((newest / "state.json").read_text())["format"] == 1
    rewrite_state(newest, format=None, draftsmith=None)  # of the first version, which did not say
    assert run_training(config, resume=True)[0].finished
    rewrite_state(newest, format=2, draftsmith="9.1")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(
        ConfigError,
        match=r"step-10 has format 2, written by draftsmith 9\.1; "
        rf"draftsmith {re.escape(__version__)} reads format 1\. "
        r"Resume with that version, or start a new run with drafter\.init set to this run's draft folder",
    ):
        run_training(config, resume=True)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_a_config_of_another_version_is_refused_by_key_and_version(short: MakeConfig, tmp_path: Path) -> None:
    config = short(tmp_path / "run")
    run_training(config)
    own = tmp_path / "run" / "config.yaml"
    assert own.read_text().startswith(f"# written by draftsmith {__version__}\n")
    newer = own.read_text().replace(__version__, "9.1", 1).replace("\ntrain:\n", "\ntrain:\n  sparkle: 3\n")
    own.write_text(newer)
    with pytest.raises(
        ConfigError, match=rf"unknown key train\.sparkle.*; draftsmith 9\.1 wrote this run, and this is {__version__}: "
    ):
        run_training(config, resume=True)
    own.write_text(newer.replace("9.1", __version__, 1))  # a slip of this version's user
    with pytest.raises(ConfigError, match=r"unknown key train\.sparkle; [^;]*$"):
        run_training(config, resume=True)


def test_the_best_and_the_newest_checkpoints_stay(short: MakeConfig, tmp_path: Path) -> None:
    """`keep` counts the newest; the best one stays beside them, and a damaged one is nobody's to delete."""
    config = short(tmp_path / "run", checkpoint__every=2, checkpoint__keep=2)
    run_training(config)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 2)
    assert checkpoints.steps() == [4, 8, 10], "τ was best after step 4"
    (tmp_path / "run" / "checkpoints" / "step-2.damaged").mkdir()
    newest = checkpoints.latest(print)
    assert newest is not None
    checkpoints.drop_old(newest.state)
    assert (tmp_path / "run" / "checkpoints" / "step-2.damaged").is_dir()
