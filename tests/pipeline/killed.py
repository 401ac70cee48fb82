"""Processes that kill themselves at a chosen instant: a program for tests, run with the words of its `main`."""

import itertools
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WATCHED = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


def watch(folder: Path, meet: Callable[[str], None]) -> None:
    """From now on `meet` is told before this process opens, renames, deletes or makes durable what lies in a folder.

    Python's own audit events tell, and a wrapper around `os.fsync`, which has none.
    """
    inside = os.path.abspath(folder)

    def heard(event: str, given: tuple[Any, ...]) -> None:
        if event in _WATCHED and given and isinstance(given[0], str | os.PathLike):
            path = os.fspath(given[0])
            deep = event in ("os.remove", "os.rmdir") and given[-1] != -1  # inside a tree that is being deleted
            if deep or os.path.abspath(path).startswith(inside):
                meet(f"{event} {os.path.relpath(path, inside) if not deep else path}")

    fsync = os.fsync

    def durable(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}") if os.path.exists("/proc/self/fd") else inside
        if path.startswith(inside):
            meet(f"fsync {os.path.relpath(path, inside)}")
        fsync(file)

    os.fsync = durable
    sys.addaudithook(heard)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(number: int) -> Callable[[str], None]:
    """Kills this process when it is about to take its n-th step on the disk (from 1)."""
    steps = itertools.count(1)

    def meet(event: str) -> None:
        if next(steps) == number:
            die()

    return meet


def die_in_a_write(nbytes: int) -> None:
    """Lets the kernel kill this process when a file that it writes grows beyond this size: in the middle of a write."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


@dataclass(frozen=True)
class Case:
    """Something that is written. `read` sees what is there, after `recover`."""

    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    recover: Callable[[Path], None]
    read: Callable[[Path], Any]


def cases() -> dict[str, Case]:
    import torch

    from draftsmith.drafter.checkpoint import write_folder
    from draftsmith.files import recover, write_text
    from draftsmith.pipeline.checkpoint import Checkpoint, Checkpoints, TrainState
    from draftsmith.pipeline.store import DiskStore, StoreIdentity

    def checkpoint(step: int, value: float) -> Checkpoint:
        state = TrainState(step, 20, 1, {"target": [], "drafter": []}, 1, "t", "d", True, None, None)
        return Checkpoint(state, {"w": torch.full((5000,), value)}, {"w/m": torch.full((5000,), -value)})

    def save(folder: Path, *given: Checkpoint, keep: int = 9) -> None:
        checkpoints = Checkpoints(folder, keep)
        for item in given:
            checkpoints.save(item)
            checkpoints.drop_old(item.state)

    def newest(folder: Path) -> tuple[int, float, float]:
        def damaged(line: str) -> None:
            raise AssertionError(line)

        checkpoints = Checkpoints(folder, 9)
        assert all(len(list(folder.joinpath(f"step-{n}").iterdir())) == 4 for n in checkpoints.steps()), "one in half"
        found = checkpoints.latest(damaged)
        assert found is not None
        (w,), (m,) = found.weights["w"].unique().tolist(), found.optimizer["w/m"].unique().tolist()
        return found.state.step, w, m

    def texts(path: Path) -> str:
        return (path / "text").read_text() if (path / "text").exists() else ""

    def drafter(folder: Path, value: float) -> None:
        write_folder(folder / "draft", {"w": torch.full((5000,), value)}, {"config.json": str(value)})

    def store(folder: Path) -> DiskStore:
        def damaged(line: str) -> None:
            raise AssertionError(line)

        identity = StoreIdentity("t", (0,), "float32", "d")
        return DiskStore(folder, identity, 3, torch.float32, torch.float32, damaged, shard_bytes=1)

    def keep_features(folder: Path, number: int) -> None:
        kept = store(folder)
        kept.put([number], [torch.full((2000, 4), float(number))])
        kept.close()

    def features(folder: Path) -> dict[int, list[float]]:
        kept = store(folder)
        found = {number: kept.get([number]) for number in range(3)}
        kept.close()
        return {number: hidden[0].unique().tolist() for number, hidden in found.items() if hidden}

    def drafter_bytes(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "draft").glob("*")}

    return {
        "a checkpoint after others, and those beyond keep": Case(
            lambda folder: save(folder, checkpoint(3, 3.0), checkpoint(5, 5.0)),
            lambda folder: save(folder, checkpoint(10, 10.0), keep=1),
            lambda folder: Checkpoints(folder, 1).recover(),
            newest,
        ),
        "a checkpoint in the place of another": Case(
            lambda folder: save(folder, checkpoint(5, 5.0)),
            lambda folder: save(folder, checkpoint(5, 6.0)),
            lambda folder: Checkpoints(folder, 1).recover(),
            newest,
        ),
        "a first drafter folder": Case(
            lambda folder: None,
            lambda folder: drafter(folder, 2.0),
            lambda folder: recover(folder / "draft"),
            drafter_bytes,
        ),
        "a drafter folder in the place of another": Case(
            lambda folder: drafter(folder, 1.0),
            lambda folder: drafter(folder, 2.0),
            lambda folder: recover(folder / "draft"),
            drafter_bytes,
        ),
        "a shard of features after another": Case(
            lambda folder: keep_features(folder, 1),
            lambda folder: keep_features(folder, 2),
            lambda folder: store(folder).close(),
            features,
        ),
        "a text in the place of another": Case(
            lambda folder: write_text(folder / "text", ["one"]),
            lambda folder: write_text(folder / "text", ["two"]),
            lambda folder: recover(folder / "text"),
            texts,
        ),
    }


def try_all(case: Case, place: Path) -> list[str]:
    """Kills a process in the middle of its files, and before every step it takes on the disk for a case. What is there
    then is the old or the new, whole, and nothing else; and the same can be done again.

    Returns the steps. This process has one thread, so it can fork.
    """
    from draftsmith.files import LOCK

    before, after = place / "before", place / "after"
    before.mkdir(parents=True)
    case.prepare(before)
    shutil.copytree(before, after)
    case.act(after)
    old, new = case.read(before), case.read(after)
    assert old != new

    def survives(death: Callable[[Path], None]) -> bool:
        work = place / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(before, work)
        survived = _fork(lambda: (death(work), case.act(work)))
        case.recover(work)
        assert case.read(work) in ((new,) if survived else (old, new))
        assert not [p for p in work.iterdir() if p.name.startswith(".") and p.name != LOCK], "something was left"
        case.act(work)
        assert case.read(work) == new
        assert {path.name for path in work.iterdir()} == {path.name for path in after.iterdir()}
        return survived

    assert not survives(lambda work: die_in_a_write(0))
    for nbytes in (1, 10_000, 20_000):
        survives(lambda work, nbytes=nbytes: die_in_a_write(nbytes))  # type: ignore[misc]
    number = 1
    while not survives(lambda work, number=number: watch(work, die_at(number))):  # type: ignore[misc]
        number += 1
    steps = place / "steps"

    def act_and_tell(folder: Path) -> None:
        told: list[str] = []
        watch(folder, told.append)
        case.act(folder)
        steps.write_text("\n".join(told))

    shutil.rmtree(place / "work")
    shutil.copytree(before, place / "work")
    assert _fork(lambda: act_and_tell(place / "work"))
    found = steps.read_text().splitlines()
    assert len(found) == number - 1, "a step was not tried"
    return found


def _fork(do: Callable[[], Any]) -> bool:
    """Whether a child that does this lives to its end."""
    child = os.fork()
    if child == 0:
        try:
            do()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, "the child failed before it was killed"
        return True
    assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXFSZ), status
    return False


def run(number: int, start: str, words: list[str], folder: Path) -> int:
    """`draftsmith` with these words, killed before the n-th step on the disk that begins so. An evaluation counts as
    one, after its first prompt."""
    from draftsmith.cli import main
    from draftsmith.pipeline import journal

    left = itertools.count(number, -1)

    def meet(event: str) -> None:
        if event.startswith(start) and next(left) == 1:
            die()

    measure = journal.decoded_tau

    def evaluate(target: Any, drafter: Any, prompts: Any, *more: Any) -> float:
        measure(target, drafter, prompts[:1], *more)
        meet("evaluate")
        return measure(target, drafter, prompts, *more)

    journal.decoded_tau = evaluate
    watch(folder, meet)
    return main(words)


def nurse() -> None:
    """Imports the program, and then does nothing but fork: every line of input is one of

    - `start`, a folder, when to be killed ("" or as for `run`), words: a child runs `draftsmith` there from its start,
      in a process of its own. Answers its number.
    - `wait` and a child's number: answers its exit code, or minus the signal that ended it.
    """
    import transformers

    import draftsmith.report.session  # noqa: F401
    from draftsmith.cli import main

    _ = transformers.AutoTokenizer, transformers.AutoModelForCausalLM, transformers.Qwen3ForCausalLM
    for line in sys.stdin:
        what, *given = json.loads(line)
        if what == "wait":
            _, status = os.waitpid(given[0], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                folder, until, words = given
                os.chdir(folder)
                log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                for stream in (1, 2):
                    os.dup2(log, stream)
                os.close(log)
                number, _, start = until.partition(" ")
                code = run(int(number), start, words, Path("run")) if until else main(words)
                sys.stdout.flush()
                os._exit(code)
        print(answer, flush=True)


def main() -> int:
    if sys.argv[1] == "nurse":
        nurse()
        return 0
    if sys.argv[1] == "all":
        print(json.dumps({name: try_all(case, Path(sys.argv[2]) / name) for name, case in cases().items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
