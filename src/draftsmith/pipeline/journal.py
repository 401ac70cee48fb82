"""What a run leaves behind: metrics, evaluations, checkpoints, the served drafter."""

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from draftsmith import __version__
from draftsmith.decode.evaluate import decoded_tau
from draftsmith.drafter.checkpoint import save_drafter
from draftsmith.drafter.model import Drafter
from draftsmith.errors import NO_READER, NO_ROOM, InputError, explained
from draftsmith.nouns import StepRecord
from draftsmith.pipeline.bad_rows import BadRows
from draftsmith.pipeline.checkpoint import Checkpoint, Checkpoints, TrainState
from draftsmith.pipeline.metrics import StepLog
from draftsmith.pipeline.prepare import Job
from draftsmith.pipeline.workers import DrafterWorker
from draftsmith.report.card import model_card
from draftsmith.target.load import stored_dtype

LOST_STEPS = 3  # in a row, without a row that could be learned from


class DivergedError(ArithmeticError):
    """The drafter's weights are NaN or infinite, or give nothing that is finite."""


class Listener(Protocol):
    """Somebody who watches a run: a terminal, TensorBoard."""

    def step(self, record: StepRecord, tau: float | None) -> None: ...

    def log(self, line: str) -> None: ...


@dataclass(frozen=True, eq=False, slots=True)
class _Best:
    """A drafter that is to be written as `best/`: the one in training, or a copy of it if that did not work at once."""

    drafter: Drafter
    step: int
    tau: float


class Journal:
    """Keeps the record of a run. Called by replica 0 between steps, and by the main thread when workers have ended.

    Order within a step: evaluation, lines in `bad-rows.jsonl`, line in `metrics.jsonl`, `best/`, checkpoint. So a
    checkpoint never knows of a step whose line is not on disk, nor of a best drafter that is not. What cannot be
    written (a full disk) is said, waits, and is tried again after every step in the same order, while training goes on;
    the checkpoint is then that of the later step.
    """

    def __init__(
        self, folder: Path, job: Job, worker: DrafterWorker, bad_rows: BadRows, start: TrainState | None
    ) -> None:
        """`worker` is replica 0."""
        self.folder, self.job, self.bad_rows, self.clock = folder, job, bad_rows, worker.clock
        self.drafter, self.optimizers = worker.drafter, worker.optimizers
        self.checkpoints = Checkpoints(folder / "checkpoints", job.config.checkpoint.keep)
        self.listeners: list[Listener] = []
        self.best_tau = start.best_tau if start else None
        self.best_step = start.best_step if start else None
        self.last_step = start.step if start else 0
        self.saved_step = start.step if start else None
        self.compiles_after_warmup = 0
        self.recent: deque[StepRecord] = deque(maxlen=10)
        self._metrics = StepLog(folder / "metrics.jsonl", self.last_step)
        self._best: _Best | None = None  # not written yet
        self._checkpoint_due = False
        self._lost_steps = 0
        self._trouble: int | None = None  # error number of what could not be written

    def record(self, record: StepRecord) -> None:
        """One step has ended on all replicas."""
        self.last_step = record.step
        self.recent.append(record)
        for warning in self.bad_rows.settle(record.step):
            self.log(warning)
        self._check_progress(record)
        if record.compiles_after_warmup and not self.compiles_after_warmup:
            self.log(f"warning: step {record.step} compiled something that the warm-up had not; it may be slow")
        self.compiles_after_warmup = record.compiles_after_warmup
        tau = self._evaluate(record.step)
        self._metrics.add(asdict(record) | ({"tau": tau} if tau is not None else {}))
        self._tell(lambda listener: listener.step(record, tau))
        every = self.job.config.checkpoint.every
        due = every > 0 and record.step % every == 0
        self._checkpoint_due |= due
        self._write_or_warn(again=due)

    def log(self, line: str) -> None:
        self._tell(lambda listener: listener.log(line))

    def _tell(self, tell: Callable[[Listener], None]) -> None:
        """A display that finds no room (a log on the disk that is full) or no reader does not end a run: its record is
        kept here."""
        for listener in self.listeners:
            try:
                tell(listener)
            except OSError as error:
                if error.errno not in (*NO_ROOM, *NO_READER):
                    raise

    def finish(self) -> None:
        """Saves what is left, and the last weights as checkpoint and as `draft/`.

        Raises:
            InputError: something cannot be written. Then the rest is there all the same, and nothing is there in half.
        """
        self._checkpoint_due = self.saved_step != self.last_step
        failure: OSError | None = None
        for write in (self._write_due, lambda: self._save_draft("draft", self.drafter, self.last_step, None)):
            try:
                write()
            except OSError as error:
                failure = failure or error
        if failure:
            last = f"from step {self.saved_step}" if self.saved_step is not None else "from the start"
            raise InputError(
                f"step {self.last_step} could not be saved: {explained(failure) or failure}, then go on with --resume "
                f"({last})"
            ) from failure
        self.checkpoints.drop_old(self._state())

    def close(self) -> None:
        """Closes its files, after a good or a bad end."""
        self._metrics.close()
        self.bad_rows.close()

    def _write_or_warn(self, again: bool) -> None:
        """Writes all that is due. What goes wrong is said when it begins, when its cause changes, and `again`."""
        try:
            self._write_due()
        except OSError as error:
            if self._best and self._best.drafter is self.drafter:
                self._best = replace(self._best, drafter=deepcopy(self.drafter).cpu())
            if again or error.errno != self._trouble:
                self.log(
                    f"warning: step {self.last_step} could not be saved: {explained(error) or error}; training goes "
                    "on, and saving is tried again after every step"
                )
            self._trouble = error.errno
        else:
            if self._trouble is not None:
                self.log(f"step {self.last_step}: all that could not be saved before is saved now")
            self._trouble = None

    def _write_due(self) -> None:
        self.clock.beat(f"saving step {self.last_step}")
        self.bad_rows.write()
        self._metrics.write()
        if self._best:
            self._save_draft("best", self._best.drafter, self._best.step, self._best.tau)
            self._best = None
        if self._checkpoint_due:
            self.clock.beat(f"saving the checkpoint of step {self.last_step}")
            self._check_weights()
            self.bad_rows.sync()
            self._metrics.sync()
            state = self._state()
            path = self.checkpoints.save(Checkpoint(state, self.drafter.state_dict(), self.optimizers.state()))
            self.saved_step, self._checkpoint_due = self.last_step, False
            self.log(f"saved {path}")
            self.checkpoints.drop_old(state)

    def _state(self) -> TrainState:
        job = self.job
        return TrainState(
            step=self.last_step,
            steps=job.steps,
            threads=job.threads,
            topology={"target": list(job.topology.target), "drafter": list(job.topology.drafter)},
            target_batch_rows=job.config.pipeline.target_batch_rows,
            fingerprint=job.target.fingerprint,
            data_fingerprint=job.data_fingerprint,
            held_out=job.corpus.held_out_lines > 0 or job.config.eval.prompts is None,
            best_tau=self.best_tau,
            best_step=self.best_step,
        )

    def _check_progress(self, record: StepRecord) -> None:
        """After a step without a row that could be learned from: is it the rows, or the drafter?"""
        self._lost_steps = self._lost_steps + 1 if record.loss is None else 0
        if self._lost_steps:
            self._check_weights()
        if self._lost_steps == LOST_STEPS:
            raise DivergedError(
                f"not one row of the last {LOST_STEPS} steps could be learned from; {self.bad_rows.path} says why. "
                "Lower train.lr and train.matrix_lr if it is their loss, and start a new run"
            )

    def _check_weights(self) -> None:
        """Raises `DivergedError` for weights that nothing can go on from: they are never saved."""
        for name, weight in self.drafter.named_parameters():
            if not weight.isfinite().all():
                raise DivergedError(
                    f"after step {self.last_step} {name} holds NaN or infinite values; they are not saved. Lower "
                    "train.lr and train.matrix_lr, or train.clip, and start a new run"
                )

    def _evaluate(self, step: int) -> float | None:
        """Decoded τ on the held-out prompts, if one is due; the best so far is kept, ties go to the later step."""
        config = self.job.config.eval
        if not config.every or step % config.every or not self.job.prompts:
            return None
        self._check_weights()  # the best drafter is saved, too
        target = self.job.target
        self.log(f"step {step}: decoding {len(self.job.prompts)} prompts to measure τ")
        drafter = self.drafter if self.drafter.fc.weight.device == target.device else deepcopy(self.drafter)
        beat = partial(self.clock.beat, f"evaluation at step {step}")
        tau = decoded_tau(target, drafter.to(target.device), self.job.prompts, config.max_new_tokens, beat)
        if self.best_tau is None or tau >= self.best_tau:
            self.best_tau, self.best_step = tau, step
            self._best = _Best(self.drafter, step, tau)
        return tau

    def _save_draft(self, name: str, drafter: Drafter, step: int, tau: float | None) -> None:
        job = self.job
        provenance: dict[str, Any] = {
            "draftsmith": __version__,
            "target": job.config.target.model,
            "target_revision": job.config.target.revision,
            "target_adapter": job.config.target.adapter,
            "target_fingerprint": job.target.fingerprint,
            "step": step,
            "tau": tau,
            "decisions": {d.name: [str(d.value), d.reason] for d in job.decisions},
        }
        card = model_card(job.target.spec.path, drafter.config, step, tau)
        save_drafter(
            self.folder / name, drafter, dtype=stored_dtype(job.target.config), provenance=provenance, card=card
        )
