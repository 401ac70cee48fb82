"""Commands as a person meets them: the library's functions with a console around them."""

import sys
import threading
from pathlib import Path

import torch
from rich.console import Console

from draftsmith.config import Config
from draftsmith.drafter.checkpoint import load_drafter, read_provenance
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter
from draftsmith.errors import InputError
from draftsmith.pipeline.prepare import Job
from draftsmith.pipeline.trainer import Run, RunResult, train
from draftsmith.report.card import launch_lines
from draftsmith.report.progress import Display, Displays, LiveDisplay, PlainDisplay, TensorBoard
from draftsmith.target.load import Target, TargetSpec, load_target

console = Console()


def say(line: str) -> None:
    """One plain line."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


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
    if not result.finished:
        say(f"go on with: draftsmith train {result.folder}/config.yaml --resume")
    return result


def print_launch_lines(target: str, draft: Path, adapter: str | None = None) -> None:
    """How to serve the drafter."""
    if adapter:
        say(f"serve {target} with {adapter} merged into it (peft: merge_and_unload), not beside it:")
    block_size = DrafterConfig.read(draft).block_size
    for server, line in launch_lines(target, str(draft), block_size).items():
        say(f"serve it with {server}:\n    {line}")


def load_pair(
    target_model: str, draft: Path, device: torch.device, adapter: str | None = None
) -> tuple[Target, Drafter]:
    """A target and its drafter for decoding; warns if the drafter was trained for another target."""
    drafter = load_drafter(draft, device)
    spec = TargetSpec(target_model, adapter=adapter)
    check_fit(spec, drafter, draft)
    target = load_target(spec, drafter.config.target_layer_ids, device)
    warn_if_foreign(target, draft)
    return target, drafter


def check_fit(spec: TargetSpec, drafter: Drafter, draft: Path) -> None:
    """A drafter is for a target of its own shape.

    Raises:
        InputError: it is for another.
    """
    shape = spec.config()
    expected = (shape.num_hidden_layers, shape.hidden_size, shape.vocab_size)
    found = (drafter.config.num_target_layers, drafter.config.hidden_size, drafter.config.vocab_size)
    if expected != found:
        raise InputError(
            f"drafter {draft} is for a target of {found[0]} layers, hidden size {found[1]} and vocabulary {found[2]}; "
            f"{spec.model} has {expected[0]}, {expected[1]} and {expected[2]}"
        )


def warn_if_foreign(target: Target, draft: Path) -> None:
    """Says so if a drafter was trained for another target."""
    trained_for = read_provenance(draft).get("target_fingerprint")
    if trained_for is not None and trained_for != target.fingerprint:
        merged = f" with adapter {target.spec.adapter}" if target.spec.adapter else ""
        say(
            f"warning: {draft} was trained for another target, tokenizer or chat template than {target.spec.model}"
            f"{merged}; the output stays right, but expect a lower τ"
        )
