"""Commands as a person meets them: the library's functions with a console around them."""

import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from draftsmith.compile.warmup import warm_up
from draftsmith.config import Config
from draftsmith.data.conversations import read_prompts
from draftsmith.data.template import Renderer
from draftsmith.decisions import Ledger
from draftsmith.decode.evaluate import EvalReport, evaluate
from draftsmith.drafter.checkpoint import check_target, load_drafter, read_provenance
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter
from draftsmith.pipeline.machine import this_machine
from draftsmith.pipeline.prepare import Job
from draftsmith.pipeline.topology import Topology, choose_device, choose_threads, choose_topology, device_of
from draftsmith.pipeline.trainer import Run, RunResult, train
from draftsmith.pipeline.warmup import NOTHING, planned_signatures
from draftsmith.report.card import launch_lines
from draftsmith.report.console import console, say
from draftsmith.report.progress import Display, Displays, LiveDisplay, PlainDisplay, TensorBoard
from draftsmith.report.table import eval_table, warmup_table
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


def load_pair(
    target_model: str, draft: Path, device: torch.device, adapter: str | None = None
) -> tuple[Target, Drafter]:
    """A target and its drafter for decoding; warns if the drafter was trained for another target."""
    drafter = load_drafter(draft, device)
    spec = TargetSpec(target_model, adapter=adapter)
    check_target(drafter.config, spec.config(), f"--draft {draft}", target_model)
    target = load_target(spec, drafter.config.target_layer_ids, device)
    trained_for = read_provenance(draft).get("target_fingerprint")
    if trained_for is not None and trained_for != target.fingerprint:
        merged = f" with adapter {adapter}" if adapter else ""
        say(
            f"warning: {draft} was trained for another target, tokenizer or chat template than {target_model}{merged}; "
            "the output stays right, but expect a lower τ"
        )
    return target, drafter


def evaluate_and_show(
    target_model: str,
    draft: Path,
    prompt_files: Sequence[str],
    max_new_tokens: int,
    out: Path | None,
    adapter: str | None = None,
) -> None:
    """`draftsmith eval`."""
    machine, decide = this_machine(), Ledger()
    kind = decide(choose_device("auto", len(machine.devices)))
    topology: Topology = decide(choose_topology("auto", kind, len(machine.devices)))
    threads = choose_threads(None, topology, machine.cores)  # as a training run, so that figures can be compared
    torch.set_num_threads(decide(threads))
    say(str(threads))
    target, drafter = load_pair(target_model, draft, device_of(topology.target[0]), adapter)
    renderer = Renderer(target.tokenizer)
    prompts = [renderer.prompt_ids(prompt) for prompt in read_prompts(prompt_files)]
    report = evaluate_with_status(target, drafter, prompts, max_new_tokens)
    console.print(eval_table(report))
    if out is not None:
        out.write_text(json.dumps(report.to_json(), indent=2) + "\n")


def evaluate_with_status(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> EvalReport:
    """Evaluates, showing how far it is."""
    with console.status("decoding") as status:
        progress: Callable[[int], None] = lambda done: status.update(f"decoding {done} / {len(prompts)}")  # noqa: E731
        return evaluate(target, drafter, prompts, max_new_tokens, progress)
