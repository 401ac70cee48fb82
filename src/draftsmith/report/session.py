"""Commands as a person meets them: the library's functions with a console around them."""

import sys
import threading
from pathlib import Path

import torch

from draftsmith.compile.warmup import warm_up
from draftsmith.config import Config
from draftsmith.decisions import Ledger
from draftsmith.drafter.checkpoint import check_target, load_drafter, read_provenance
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter
from draftsmith.pipeline.prepare import Job
from draftsmith.pipeline.trainer import Run, RunResult, train
from draftsmith.pipeline.warmup import NOTHING, planned_signatures
from draftsmith.report.card import launch_lines
from draftsmith.report.console import console, say
from draftsmith.report.progress import Display, Displays, LiveDisplay, PlainDisplay, TensorBoard
from draftsmith.report.table import warmup_table
from draftsmith.target.load import Target, TargetSpec, load_target


def train_and_show(config: Config, *, resume: bool, stop: threading.Event, job: Job | None = None) -> RunResult:
    """Trains with a display: live on a terminal, lines elsewhere, TensorBoard if the config asks for it."""
    opened: list[Display] = []

    def listener(run: Run) -> Displays:
        steps = run.job.steps
        live = sys.stdout.isatty()
        opened.append(LiveDisplay(console, steps, run.gauges) if live else PlainDisplay(console, steps))
        if config.report.tensorboard:
            opened.append(TensorBoard(Path(config.run.dir)))
        return Displays(opened)

    with Displays(opened):
        result = train(config, resume=resume, stop=stop, listener=listener, log=say, job=job)
    best = f"; best τ {result.best_tau:.3f} at step {result.best_step}" if result.best_tau is not None else ""
    say(f"{'finished' if result.finished else 'stopped'} at step {result.step}: {result.folder}/draft{best}")
    if result.compiles_after_warmup:
        say(
            f"warning: {result.compiles_after_warmup} compilations after the warm-up, in a healthy run there are none; "
            "compiles_after_warmup in metrics.jsonl says at which steps"
        )
    if not result.finished:
        say(f"go on with: draftsmith train {result.folder}/config.yaml --resume")
    return result


def warm_up_and_show(config: Config) -> None:
    """`draftsmith warmup`: compiles what a run of this config needs, and says what it took."""
    decide = Ledger()
    signatures = planned_signatures(config, decide)
    for decision in decide.decisions:
        say(str(decision))
    if not signatures:
        say(NOTHING)
        return
    with console.status("compiling") as status:
        results = warm_up(signatures, lambda result: status.update(f"compiled {result.name}"))
    console.print(warmup_table(results))


def print_launch_lines(target: str, draft: Path, adapter: str | None = None) -> None:
    """How to serve the drafter."""
    if adapter:
        say(f"serve {target} with {adapter} merged into it (peft: merge_and_unload), not beside it:")
    block_size = DrafterConfig.read(draft).block_size
    for server, line in launch_lines(target, str(draft), block_size).items():
        say(f"serve it with {server}:\n    {line}")


def load_pair(spec: TargetSpec, draft: Path, device: torch.device) -> tuple[Target, Drafter]:
    """A target and its drafter for decoding; warns if the drafter was trained for another target."""
    drafter = load_drafter(draft, device)
    check_target(drafter.config, spec.config(), f"--draft {draft}", spec.model)
    target = load_target(spec, drafter.config.target_layer_ids, device)
    warn_if_foreign(target, draft)
    return target, drafter


def warn_if_foreign(target: Target, draft: Path) -> None:
    """Says so if a drafter was trained for another target."""
    trained_for = read_provenance(draft).get("target_fingerprint")
    if trained_for is not None and trained_for != target.fingerprint:
        merged = f" with adapter {target.spec.adapter}" if target.spec.adapter else ""
        say(
            f"warning: {draft} was trained for another target, tokenizer or chat template than {target.spec.model}"
            f"{merged}; the output stays right, but expect a lower τ"
        )
