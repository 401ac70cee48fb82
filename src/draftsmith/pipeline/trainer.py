"""A training run from start to end: assemble the workers, run them, leave a served model."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from draftsmith import __version__
from draftsmith.compile import guard
from draftsmith.config import Config, differing_keys, dump_config, load_config
from draftsmith.drafter.checkpoint import read_provenance
from draftsmith.drafter.model import RotaryTable
from draftsmith.errors import ConfigError, NothingToTrainOnError
from draftsmith.files import LOCK, lock_folder, recover, write_text
from draftsmith.nouns import Features
from draftsmith.pipeline.bad_rows import BadRows
from draftsmith.pipeline.channel import Channel
from draftsmith.pipeline.checkpoint import Checkpoint, Checkpoints
from draftsmith.pipeline.gradsync import GradientSync
from draftsmith.pipeline.journal import Journal, Listener
from draftsmith.pipeline.keeping import check_keeping, open_store
from draftsmith.pipeline.machine import this_machine
from draftsmith.pipeline.optim import Optimizers, load_weights
from draftsmith.pipeline.prepare import Job, Resolved, check_capacity, prepare
from draftsmith.pipeline.threads import Crew, Failure, thread_stacks
from draftsmith.pipeline.topology import device_of
from draftsmith.pipeline.transfer import to_device, worker_stream
from draftsmith.pipeline.warmup import run_signatures, warm_up_and_log
from draftsmith.pipeline.watch import Watch, WorkerClock
from draftsmith.pipeline.workers import DrafterWorker, Feed, Meeting, TargetWorker, TrainSettings
from draftsmith.report.crash import NAME as CRASH_REPORT
from draftsmith.report.crash import Scene, clear_reports, flight_recorder, reported
from draftsmith.report.progress import Gauges

WRITTEN_BY = "written by draftsmith "  # heads the config of a run
MAY_DIFFER = ("topology", "device", "checkpoint.", "eval.")  # between a run's config and the one it is resumed with


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `finished` is False after a stop request."""

    folder: Path
    step: int
    finished: bool
    best_tau: float | None
    best_step: int | None
    compiles_after_warmup: int = 0


class Run:
    """The objects of one run: a channel, a feed, workers, a journal. Made by `train`, used once."""

    def __init__(self, job: Job, folder: Path, checkpoint: Checkpoint | None, stop: threading.Event) -> None:
        self.job, self.stop = job, stop
        config = job.config
        start = checkpoint.state if checkpoint else None
        rows_per_step, first_step = config.train.rows_per_step, start.step if start else 0
        rows = range(first_step * rows_per_step, job.steps * rows_per_step)
        self.channel: Channel[Features] = Channel(config.pipeline.channel_mib * 2**20, first=rows.start)
        feed = Feed(job.source, self.channel, rows, config.pipeline.target_batch_rows, job.feature_bytes_per_token)
        self.store = open_store(job.keeping, job.features_identity, self.say)
        self.targets = {
            f"target {name}": TargetWorker(
                job.target.replica(device_of(name)), self.store, feed, self.channel, self.say
            )
            for name in job.topology.target
        }
        self.sync = GradientSync(len(job.topology.drafter))
        settings = TrainSettings(
            first_step=first_step,
            steps=job.steps,
            rows_per_step=rows_per_step,
            warmup=config.train.warmup,
            schedule=config.train.schedule,
            clip=config.train.clip,
            gamma=job.gamma,
            mask_token=job.drafter.config.mask_token_id,
            compiled_before=guard.count_compilations(),
        )
        if checkpoint:
            load_weights(job.drafter, checkpoint.weights)
        self.bad_rows = BadRows(folder, first_step, config.train.max_bad_rows)
        self.drafters = {
            f"drafter {name}": self._replica(number, name, settings, checkpoint)
            for number, name in enumerate(job.topology.drafter)
        }
        first, *_ = self.drafters.values()
        self.journal = Journal(folder, job, first, self.bad_rows, start)
        self.clocks: dict[str, WorkerClock] = {n: w.clock for n, w in (self.targets | self.drafters).items()}
        self.watch = Watch(self.clocks, config.pipeline.stall_s, self.say)

    def say(self, line: str) -> None:
        """A line for the log, from any thread."""
        self.journal.log(line)

    def _replica(self, number: int, name: str, settings: TrainSettings, checkpoint: Checkpoint | None) -> DrafterWorker:
        job, device = self.job, device_of(name)
        drafter = deepcopy(job.drafter).to(device)
        train = job.config.train
        optimizers = Optimizers(
            drafter, train.optimizer, lr=train.lr, matrix_lr=train.matrix_lr, weight_decay=train.weight_decay
        )
        if checkpoint:
            optimizers.load_state(checkpoint.optimizer)
        frozen = (to_device(job.target.embedding_VH, device), to_device(job.target.head_VH, device))
        rotary = RotaryTable(drafter.config, job.config.data.row_tokens + drafter.config.block_size, device)
        meeting = Meeting(self.channel, self.sync, self.bad_rows, self.say)
        return DrafterWorker(number, drafter, optimizers, frozen, rotary, meeting, settings)

    def gauges(self) -> Gauges:
        """Busy seconds of every worker and the channel's level, for the display."""
        return Gauges({name: clock.busy_s for name, clock in self.clocks.items()}, self.channel.statistics())

    def scene(self, failures: Sequence[Failure]) -> Scene:
        """What the run looks like now, and where its threads were at the first failure, for the crash report."""
        return Scene(
            worker=failures[0].worker if failures else "main thread",
            stacks=failures[0].stacks if failures else thread_stacks(),
            workers=self.watch.report(),
            channel=self.channel.statistics(),
            metrics=list(self.journal.recent),
            decisions=[str(decision) for decision in self.job.decisions],
        )

    def run(self, on_failure: Callable[[Failure], None]) -> None:
        """Runs all workers to the end, to a stop request, or to the first failure (raised)."""
        guard.install()
        crew = Crew(self._release, self.watch.look)
        bodies: dict[str, Callable[[], None]] = {name: worker.run for name, worker in self.targets.items()}
        bodies |= {name: self._drafter_body(worker, len(self.drafters)) for name, worker in self.drafters.items()}
        crew.run(list(bodies.items()), on_failure)
        self.store.close()

    def _drafter_body(self, worker: DrafterWorker, replicas: int) -> Callable[[], None]:
        def body() -> None:
            with worker_stream(worker.head_VH.device):
                worker.run(replicas, self.journal.record, self.stop)
            if worker.replica == 0:
                self.channel.close()  # a stopped run: targets must not wait for room any more

        return body

    def _release(self) -> None:
        self.channel.close()
        self.sync.abort()


ListenerFactory = Callable[[Run], Listener]
Log = Callable[[str], None]


def train(
    config: Config, *, resume: bool, stop: threading.Event, listener: ListenerFactory, log: Log, job: Job | None = None
) -> RunResult:
    """Trains into `config.run.dir`.

    Args:
        config: checked.
        resume: go on from the newest whole checkpoint.
        stop: set it to end after the current step, with everything saved.
        listener: makes the display, once the run exists.
        log: receives lines about decisions and events before that.
        job: the same config, prepared already (not for a resume).

    Raises:
        InputError, ConfigError: something given cannot be used.
        Exception: the first failure of a worker, after it has been logged.
    """
    folder = Path(config.run.dir)
    with locked(folder, resume):
        with reported(folder, config, log):
            checkpoint = newest_checkpoint(folder, config, log) if resume else None
            state = checkpoint.state if checkpoint else None
            if state and state.step >= state.steps and read_provenance(folder / "draft").get("step") == state.step:
                log(f"resume: {folder} is finished at step {state.step}, nothing to do")
                clear_reports(folder)
                return RunResult(folder, state.step, True, state.best_tau, state.best_step)
            if job is None:
                resolved = Resolved(state.topology, state.threads, state.held_out) if state else None
                try:
                    job = prepare(config, resolved)
                except NothingToTrainOnError as error:
                    write_rejects(folder, error.rejects)
                    raise
            check_capacity(config, job.feature_bytes_per_token)
            check_keeping(job.keeping, job.features_identity, this_machine())
            check_fingerprint(job, checkpoint)
            write_preamble(folder, job)
            for line in (*map(str, job.decisions), job.corpus.summary):
                log(line)
            warm_up_and_log(run_signatures(job.drafter.backend, job.drafter.config, job.topology), log)
        return execute(job, folder, checkpoint, stop, listener)


def newest_checkpoint(folder: Path, config: Config, log: Log) -> Checkpoint | None:
    """Where a run is resumed; None for its start.

    Raises:
        ConfigError: the run began with another config, or was written by another version.
    """
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
    checkpoints.recover()
    checkpoint = None
    if (folder / "config.yaml").exists():
        check_resume(folder, config)
        checkpoint = checkpoints.latest(log)
    elif checkpoints.steps():
        raise ConfigError(f"resume: {folder} has checkpoints but no config.yaml; put it back, it rules a resume")
    at = f"going on after step {checkpoint.state.step}" if checkpoint else "no whole checkpoint, starting at step 0"
    log(f"resume: {folder}: {at}")
    return checkpoint


def execute(
    job: Job, folder: Path, checkpoint: Checkpoint | None, stop: threading.Event, listener: ListenerFactory
) -> RunResult:
    """Runs a prepared job into an existing folder, from a checkpoint or from the start."""
    run = Run(job, folder, checkpoint, stop)
    journal = run.journal
    journal.listeners.append(listener(run))
    if run.store.summary:
        journal.log(run.store.summary)

    failures: list[Failure] = []

    def on_failure(failure: Failure) -> None:
        failures.append(failure)
        journal.log(f"{failure.worker} failed: {type(failure.error).__name__}: {failure.error}")

    with flight_recorder(folder, job.config, lambda: run.scene(failures), journal.log), closing(journal):
        run.run(on_failure)
        journal.finish()
    return RunResult(
        folder=folder,
        step=journal.last_step,
        finished=journal.last_step == job.steps,
        best_tau=journal.best_tau,
        best_step=journal.best_step,
        compiles_after_warmup=journal.compiles_after_warmup,
    )


@contextmanager
def locked(folder: Path, resume: bool) -> Iterator[None]:
    """Holds the run directory. The lock is the kernel's, so a killed process leaves none.

    Raises:
        ConfigError: another process holds it, or it is not empty and this is no resume.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir {folder} is a file; choose another name")
    _check_empty(folder, resume)  # a folder of somebody else gets no lock file either
    with lock_folder(folder, "run.dir"):
        _check_empty(folder, resume)  # another run may have begun and ended since
        for name in ("config.yaml", "rejects.jsonl", "best", "draft"):
            recover(folder / name)
        yield


def _check_empty(folder: Path, resume: bool) -> None:
    if not resume and folder.is_dir() and any(item.name not in (LOCK, CRASH_REPORT) for item in folder.iterdir()):
        raise ConfigError(f"run.dir {folder} is not empty; use --resume to go on, or choose another run.dir")


def check_resume(folder: Path, given: Config) -> None:
    """The run's own config rules; only what does not change the result may differ.

    Raises:
        ConfigError: another key differs; it is named.
    """
    own = load_own_config(folder / "config.yaml")
    for key in differing_keys(own, given):
        if key == "run.dir" or any(key == name.rstrip(".") or key.startswith(name) for name in MAY_DIFFER):
            continue
        raise ConfigError(
            f"resume: {key} differs from the run's own config; only topology, device, checkpoint.* and eval.* may. "
            f"Resume with {folder / 'config.yaml'} itself"
        )


def load_own_config(path: Path) -> Config:
    """The config of a run that another version may have written.

    Raises:
        ConfigError: it cannot be read; says if another version wrote it.
    """
    try:
        return load_config(path)
    except ConfigError as error:
        first = path.read_bytes().partition(b"\n")[0].decode(errors="replace") if os.access(path, os.R_OK) else ""
        _, found, writer = first.partition(WRITTEN_BY)
        if not found or writer == __version__:
            raise
        raise ConfigError(
            f"resume: {error}; draftsmith {writer} wrote this run, and this is {__version__}: resume with {writer}"
        ) from None


def check_fingerprint(job: Job, checkpoint: Checkpoint | None) -> None:
    """A run goes on with the target and the data it began with."""
    if checkpoint and checkpoint.state.fingerprint != job.target.fingerprint:
        raise ConfigError(
            f"resume: target.model {job.config.target.model} is not the model (or tokenizer, or template) this run "
            "began with"
        )
    if checkpoint and checkpoint.state.data_fingerprint != job.data_fingerprint:
        raise ConfigError(
            f"resume: data.train ({', '.join(job.config.data.train)}) no longer gives the documents this run began "
            "with; put the files back, or start a new run with drafter.init set to this run's draft folder"
        )


def write_preamble(folder: Path, job: Job) -> None:
    """`config.yaml` with the decisions as comments, and `rejects.jsonl`."""
    notes = [WRITTEN_BY + __version__, *map(str, job.decisions)]
    write_text(folder / "config.yaml", [dump_config(job.config, notes)])
    write_rejects(folder, [reject.to_json() for reject in job.corpus.rejects])


def write_rejects(folder: Path, lines: Sequence[str]) -> None:
    """`rejects.jsonl`: file, line and reason of every conversation that was not used."""
    write_text(folder / "rejects.jsonl", (line + "\n" for line in lines))
