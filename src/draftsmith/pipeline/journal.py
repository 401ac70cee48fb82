"""What a run leaves behind: metrics, evaluations, checkpoints, the served drafter."""

import json
from collections import deque
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from draftsmith import __version__
from draftsmith.decode.evaluate import decoded_tau
from draftsmith.drafter.checkpoint import save_drafter
from draftsmith.nouns import StepRecord
from draftsmith.pipeline.bad_rows import BadRows
from draftsmith.pipeline.checkpoint import Checkpoint, Checkpoints, TrainState
from draftsmith.pipeline.prepare import Job
from draftsmith.pipeline.workers import DrafterWorker
from draftsmith.report.card import model_card
from draftsmith.target.load import stored_dtype

BAD_ROWS = "bad-rows.jsonl"


class DivergedError(ArithmeticError):
    """The drafter's weights are NaN or infinite."""


class Listener(Protocol):
    """Somebody who watches a run: a terminal, TensorBoard."""

    def step(self, record: StepRecord, tau: float | None) -> None: ...

    def log(self, line: str) -> None: ...


class Journal:
    """Keeps the record of a run. Called by replica 0 between steps, and by the main thread when workers have ended.

    Order within a step: evaluation, line in `metrics.jsonl`, checkpoint. So a checkpoint never knows of a step whose
    line is not on disk.
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
        cut_lines(folder / "metrics.jsonl", self.last_step)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def record(self, record: StepRecord) -> None:
        """One step has ended on all replicas."""
        self.last_step = record.step
        self.recent.append(record)
        for warning in self.bad_rows.settle(record.step):
            self.log(warning)
        if record.loss is None:  # not one row could be learned from: is it the rows, or the drafter?
            self._check_weights()
        if record.compiles_after_warmup and not self.compiles_after_warmup:
            self.log(f"warning: step {record.step} compiled something that the warm-up had not; it may be slow")
        self.compiles_after_warmup = record.compiles_after_warmup
        tau = self._evaluate(record.step)
        line = asdict(record) | ({"tau": tau} if tau is not None else {})
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        for listener in self.listeners:
            listener.step(record, tau)
        every = self.job.config.checkpoint.every
        if every and record.step % every == 0:
            self.save_checkpoint()

    def log(self, line: str) -> None:
        for listener in self.listeners:
            listener.log(line)

    def finish(self) -> None:
        """Saves the last weights as checkpoint and as `draft/`."""
        if self.saved_step != self.last_step:
            self.save_checkpoint()
        self._save_draft("draft", None)
        self._metrics.close()

    def save_checkpoint(self) -> None:
        """Raises `DivergedError` instead of saving weights that nothing can go on from."""
        job = self.job
        self._check_weights()
        state = TrainState(
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
        path = self.checkpoints.save(Checkpoint(state, self.drafter.state_dict(), self.optimizers.state()))
        self.saved_step = self.last_step
        self.log(f"saved {path}")

    def _check_weights(self) -> None:
        for name, weight in self.drafter.named_parameters():
            if not weight.isfinite().all():
                raise DivergedError(
                    f"after step {self.last_step} {name} holds NaN or infinite values; the last checkpoint is whole. "
                    "Lower train.lr and train.matrix_lr, or train.clip, and start a new run"
                )

    def _evaluate(self, step: int) -> float | None:
        """Decoded τ on the held-out prompts, if one is due; the best so far is kept, ties go to the later step."""
        config = self.job.config.eval
        if not config.every or step % config.every or not self.job.prompts:
            return None
        target = self.job.target
        self.log(f"step {step}: decoding {len(self.job.prompts)} prompts to measure τ")
        drafter = self.drafter if self.drafter.fc.weight.device == target.device else deepcopy(self.drafter)
        beat = partial(self.clock.beat, f"evaluation at step {step}")
        tau = decoded_tau(target, drafter.to(target.device), self.job.prompts, config.max_new_tokens, beat)
        if self.best_tau is None or tau >= self.best_tau:
            self.best_tau, self.best_step = tau, step
            self._save_draft("best", tau)
        return tau

    def _save_draft(self, name: str, tau: float | None) -> None:
        job = self.job
        provenance: dict[str, Any] = {
            "draftsmith": __version__,
            "target": job.config.target.model,
            "target_revision": job.config.target.revision,
            "target_adapter": job.config.target.adapter,
            "target_fingerprint": job.target.fingerprint,
            "step": self.last_step,
            "tau": tau,
            "decisions": {d.name: [str(d.value), d.reason] for d in job.decisions},
        }
        card = model_card(job.target.spec.path, self.drafter.config, self.last_step, tau)
        save_drafter(
            self.folder / name, self.drafter, dtype=stored_dtype(job.target.config), provenance=provenance, card=card
        )


def cut_lines(path: Path, step: int) -> None:
    """Keeps the lines up to `step`, byte for byte; later ones belong to steps that will be taken again."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or (_step_of(line) or 0) > step:
                break
            kept += len(line)
    with path.open("rb+") as file:
        file.truncate(kept)


def _step_of(line: bytes) -> float | None:
    """None for a line that somebody has damaged: it is kept like its neighbours."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
