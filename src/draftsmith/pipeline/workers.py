"""The two bodies that run in threads: a target worker makes features, a drafter worker trains on them."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.compile import guard
from draftsmith.data.packing import RowSource
from draftsmith.drafter.anchors import make_blocks
from draftsmith.drafter.loss import LossSum, block_loss
from draftsmith.drafter.model import Drafter, RotaryTable
from draftsmith.nouns import Blocks, Features, Row, StepRecord
from draftsmith.pipeline.bad_rows import BadRows
from draftsmith.pipeline.channel import Channel
from draftsmith.pipeline.gradsync import FlatGradients, GradientSync, clip_coefficient
from draftsmith.pipeline.optim import Optimizers, learning_rate_factor
from draftsmith.pipeline.rescue import Portions, check_finite, in_halves
from draftsmith.pipeline.store import FeatureStore
from draftsmith.pipeline.transfer import blocks_to, settle, to_device, worker_stream
from draftsmith.pipeline.watch import WorkerClock
from draftsmith.target.load import Target

Say = Callable[[str], None]


class Feed:
    """Hands out batches of consecutive rows, in order, each with its bytes reserved in the channel.

    Shared by all target workers under one lock. Which worker gets a batch is left to speed; what a batch contains is
    not: batch k is always the same rows, so a feature's bits do not depend on the topology.
    """

    def __init__(
        self, source: RowSource, channel: Channel[Features], rows: range, batch_rows: int, bytes_per_token: int
    ) -> None:
        assert rows.start % batch_rows == 0
        self._source, self._channel = source, channel
        self._rows, self._batch_rows, self._bytes_per_token = rows, batch_rows, bytes_per_token
        self._next = rows.start
        self._lock = threading.Lock()

    def claim(self) -> list[Row]:
        """The next batch, or an empty list at the end. Waits until the channel has room for it."""
        with self._lock:
            stop = min(self._next + self._batch_rows, self._rows.stop)
            batch = [self._source.row(index) for index in range(self._next, stop)]
            for row in batch:
                self._channel.reserve(row.index, len(row.tokens_T) * self._bytes_per_token)
            self._next = stop
            return batch


class TargetWorker:
    """One replica of the target: claims rows, finds their features in the store or computes them, hands them in."""

    def __init__(self, target: Target, store: FeatureStore, feed: Feed, channel: Channel[Features], say: Say) -> None:
        self.target, self.store, self.feed, self.channel, self.say = target, store, feed, channel, say
        self.clock = WorkerClock()

    def run(self) -> None:
        with worker_stream(self.target.device):
            self._run()

    def _run(self) -> None:
        while batch := self.feed.claim():
            with self.clock.busy(f"features of rows {batch[0].index} to {batch[-1].index}"):
                hidden = iter(self._hidden(batch))
                features = [_joined(row, [next(hidden) for _ in row.spans]) for row in batch]
                settle(self.target.device)
            for item in features:
                self.channel.put(item.row.index, item)

    def _hidden(self, batch: list[Row]) -> Sequence[Tensor | None]:
        """Features [T_i, F] of every document of the batch, None for one that does not fit into the device's memory."""
        numbers = [span.document for row in batch for span in row.spans]
        kept = self.store.get(numbers)
        if kept is not None:
            return kept
        documents = [row.tokens_T[span.start : span.stop] for row in batch for span in row.spans]
        computed = in_halves(self.target.features, documents, self.target.device, self.say)
        whole = [hidden for hidden in computed if hidden is not None]
        return self.store.put(numbers, whole) if len(whole) == len(numbers) else computed


def _joined(row: Row, parts: Sequence[Tensor | None]) -> Features:
    """The row's features from those of its documents."""
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return Features(row, torch.empty(0), bad="its features do not fit into the target's memory")
    hidden_TF = torch.cat(whole)
    if not torch.isfinite(hidden_TF.sum(dtype=torch.float32)):  # a sum is finite only if all that is in it is
        return Features(row, torch.empty(0), bad="its features are not finite")
    return Features(row, hidden_TF)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What a step is. Rows of step s are s * rows_per_step and following; replica r of D takes every D-th of them."""

    first_step: int
    steps: int
    rows_per_step: int
    warmup: float
    schedule: str
    clip: float
    gamma: float
    mask_token: int
    compiled_before: int  # compilations of the process until training began


@dataclass(frozen=True, eq=False, slots=True)
class Meeting:
    """Where workers meet: the channel, the gradient sum, the record of bad rows, and who is told of trouble."""

    channel: Channel[Features]
    sync: GradientSync
    bad_rows: BadRows
    say: Say


@dataclass(eq=False, slots=True)
class _Totals:
    """Counts of a step on this replica; every field is a sum over labels or rows, so replicas add."""

    block_size: int
    loss: float | Tensor = 0.0
    weight: float | Tensor = 0.0
    tokens: int = 0
    anchors: int = 0
    stop: int = 0
    skipped: int = 0
    correct_B: list[Tensor] = field(default_factory=list)
    count_B: list[Tensor] = field(default_factory=list)

    def add(self, blocks: Blocks, loss: LossSum) -> None:
        self.loss = self.loss + loss.loss.detach()
        self.weight = self.weight + loss.weight
        self.anchors += len(blocks.anchors)
        self.correct_B.append(loss.correct_B)
        self.count_B.append(loss.count_B)

    def add_row(self, row: Row, bad: str) -> None:
        self.tokens += 0 if bad else len(row.tokens_T)
        self.skipped += bool(bad)

    def vector(self, device: torch.device) -> Tensor:
        """[6 + 2B] in float64: sums of counts stay exact."""
        head = [self.loss, self.weight, self.tokens, self.anchors, self.stop, self.skipped]
        zero = torch.zeros(self.block_size, device=device)
        return torch.cat(
            [
                torch.stack([torch.as_tensor(value, device=device, dtype=torch.float64) for value in head]),
                sum(self.correct_B, zero).double(),
                sum(self.count_B, zero).double(),
            ]
        )


class DrafterWorker:
    """One replica of the drafter in training. Replica 0 also keeps the record.

    Every replica ends a step with the same weights: same gradient sum, same optimizer, same order of operations.
    """

    def __init__(
        self,
        replica: int,
        drafter: Drafter,
        optimizers: Optimizers,
        frozen: tuple[Tensor, Tensor],
        rotary: RotaryTable,
        meeting: Meeting,
        settings: TrainSettings,
    ) -> None:
        self.replica, self.drafter, self.optimizers, self.rotary = replica, drafter, optimizers, rotary
        self.embedding_VH, self.head_VH = frozen
        self.channel, self.sync, self.bad_rows, self.say = meeting.channel, meeting.sync, meeting.bad_rows, meeting.say
        self.settings = settings
        self.gradients = FlatGradients(list(drafter.parameters()))
        self.clock = WorkerClock()

    def run(self, replicas: int, record: Callable[[StepRecord], None], stop: threading.Event) -> None:
        """Trains from the first step to the last, or until `stop` is set (all replicas end after the same step)."""
        for step in range(self.settings.first_step, self.settings.steps):
            began = time.perf_counter()
            totals = _Totals(self.drafter.config.block_size, stop=stop.is_set())
            self.gradients.zero()
            for index in self.rows_of(step, replicas):
                features = self.channel.take(index)
                with self.clock.busy(f"row {index} of step {step + 1}"):
                    portions = Portions(self.blocks_of(features.row), self.gradients, self.say, features.bad)
                    for blocks in portions:
                        with portions.attempt(blocks):
                            with guard.shared():
                                hidden_QH = self.forward(features, blocks)
                                loss = block_loss(hidden_QH, blocks, self.head_VH, self.drafter.config.head_scaling)
                            check_finite(loss)
                            loss.loss.backward()  # type: ignore[no-untyped-call]  # enters the guard where it must
                            totals.add(blocks, loss)
                    totals.add_row(features.row, portions.bad)
                    if portions.bad:
                        self.bad_rows.note(step + 1, features.row, portions.bad)
            sums = self.sync.reduce(self.replica, self.gradients, totals.vector(self.head_VH.device))
            with self.clock.busy(f"update of step {step + 1}"), guard.shared():  # optimizers ask whether one compiles
                lr, grad_norm = self.update(step, sums[1])
            if self.replica == 0:
                with self.clock.aside(f"record of step {step + 1}"):
                    record(self.step_record(step, sums, lr, grad_norm, time.perf_counter() - began))
            if sums[4] > 0:
                return

    def rows_of(self, step: int, replicas: int) -> range:
        """Row numbers this replica takes in a step."""
        first = step * self.settings.rows_per_step
        return range(first + self.replica, first + self.settings.rows_per_step, replicas)

    def blocks_of(self, row: Row) -> Blocks:
        """What a row asks of the drafter, on its device."""
        config, settings = self.drafter.config, self.settings
        blocks = make_blocks(row, block_size=config.block_size, mask_token=settings.mask_token, gamma=settings.gamma)
        return blocks_to(blocks, self.head_VH.device)

    def forward(self, features: Features, blocks: Blocks) -> Tensor:
        """The drafter's outputs for all slots of these blocks of the row, [Q, H]."""
        device = self.head_VH.device
        features_TF = to_device(features.hidden_TF, device)
        positions_T = to_device(features.row.positions_T, device)
        with autocast(device):
            hidden_QH: Tensor = self.drafter(features_TF, positions_T, blocks, self.embedding_VH, self.rotary)
        return hidden_QH

    def update(self, step: int, weight: Tensor) -> tuple[float, float]:
        """One optimizer step on the mean over all labels of all replicas. Returns learning rate and gradient norm.

        Without a label, or with a gradient that is not finite, the weights and the optimizer stay as they are and the
        learning rate is 0; every replica finds the same, as all have the same sum.
        """
        settings, flat = self.settings, self.gradients.flat
        flat.div_(weight.to(flat.dtype))
        norm = flat.norm()
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            return 0.0, grad_norm
        flat.mul_(clip_coefficient(norm, settings.clip))
        factor = learning_rate_factor(settings.schedule, settings.warmup, step, settings.steps)
        return self.optimizers.step(factor), grad_norm

    def step_record(self, step: int, sums: Tensor, lr: float, grad_norm: float, step_s: float) -> StepRecord:
        """The one place where a step's numbers come to the host."""
        loss, weight, tokens, anchors, _, skipped, *per_slot = sums.tolist()
        rows = self.settings.rows_per_step
        moved = math.isfinite(grad_norm)
        if weight > 0 and not moved:
            skipped = rows
            self.bad_rows.note_step(step + 1, self.rows_of(step, 1), f"the gradient's norm is {grad_norm:.4g}")
        size = self.drafter.config.block_size
        slots = zip(per_slot[1:size], per_slot[size + 1 :], strict=True)
        return StepRecord(
            step=step + 1,
            loss=loss / weight if weight > 0 else None,
            lr=lr,
            grad_norm=grad_norm if moved else None,
            rows=rows,
            skipped_rows=int(skipped),
            tokens=int(tokens),
            anchors=int(anchors),
            accuracy_per_slot=tuple(round(right / max(1.0, count), 4) for right, count in slots),
            step_s=step_s,
            tokens_per_s=tokens / step_s,
            time=time.time(),
            compiles_after_warmup=guard.count_compilations() - self.settings.compiled_before,
        )


@contextmanager
def autocast(device: torch.device) -> Iterator[bool]:
    """bf16 compute on CUDA over fp32 masters; fp32 on CPU. Gives whether it is lower."""
    lower = device.type == "cuda"
    with torch.autocast(device.type, torch.bfloat16, enabled=lower):
        yield lower
