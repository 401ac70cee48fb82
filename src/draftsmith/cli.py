"""The commands. They parse, call and print; nothing is decided here but exit codes."""

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

# Read by libraries when they are imported, so set before any of them is.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from draftsmith import __version__
from draftsmith.errors import ConfigError, InputError

if TYPE_CHECKING:
    from draftsmith.report.decoding import Request

INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `draftsmith`. Returns the exit code."""
    if sys.platform == "win32":
        print("draftsmith: Windows is not supported (no fcntl locks, no fork-safe signals); use WSL", file=sys.stderr)
        return 2
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
    except InputError as error:
        print(f"draftsmith: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before or outside training, where there is nothing to save
        print("draftsmith: interrupted", file=sys.stderr)
        return INTERRUPTED[signal.SIGINT]
    except Exception as error:  # noqa: BLE001 - the last place: one line for a person, the rest for a log
        print(f"draftsmith: {type(error).__name__}: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", []):
            print(f"draftsmith: {note}", file=sys.stderr)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a worker stuck in native code must not keep the process
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="draftsmith", description="Train and measure DFlash drafters.")
    parser.add_argument("--version", action="version", version=f"draftsmith {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a drafter for the embedded target, decode with it, report")
    demo.add_argument("--minutes", type=_positive, default=5.0, help="training time (default 5)")
    demo.add_argument("--out", type=Path, help="directory for everything (default: first free of runs/demo, ...)")
    demo.set_defaults(command=_demo)

    train = commands.add_parser("train", help="train a drafter as a config file says")
    train.add_argument("config", type=Path, metavar="CONFIG")
    train.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a key of the config")
    train.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint in run.dir")
    train.add_argument("--plan", action="store_true", help="show decisions and memory, train nothing")
    train.add_argument("--machine", type=Path, metavar="FILE", help="plan for the machine this file describes")
    train.set_defaults(command=_train)

    start = commands.add_parser("init", help="write a commented config that trains")
    start.add_argument("--target", required=True, help="folder or hub id; `demo` is the embedded one")
    start.add_argument("--data", required=True, nargs="+", metavar="F", help="JSONL files of conversations")
    start.add_argument("--out", type=Path, default=Path("draftsmith.yaml"), help="default draftsmith.yaml")
    start.set_defaults(command=_init)

    evaluate = commands.add_parser("eval", help="measure a drafter side by side with plain decoding")
    _add_decoding(evaluate)
    evaluate.add_argument(
        "--prompts", required=True, nargs="+", metavar="F", help="prompt files, or demo, humaneval, gsm8k, mtbench"
    )
    evaluate.add_argument("--limit", type=_count, metavar="N", help="only the first N prompts of each file")
    evaluate.add_argument(
        "--baseline", nargs="+", default=[], metavar="B", help="also measure: ngram (look-up), other drafter folders"
    )
    evaluate.add_argument("--json", type=Path, metavar="F", help="write the figures here")
    evaluate.set_defaults(command=_eval)

    generate = commands.add_parser("generate", help="answer a prompt, showing which tokens were drafted")
    _add_decoding(generate)
    generate.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    generate.add_argument("prompt", metavar="PROMPT")
    generate.set_defaults(command=_generate)
    return parser


def _add_decoding(command: argparse.ArgumentParser) -> None:
    """What `eval` and `generate` decode with."""
    command.add_argument("--target", required=True, help="folder or hub id; `demo` is the embedded one")
    command.add_argument("--adapter", help="LoRA adapter to merge into the target")
    command.add_argument("--draft", required=True, type=Path, help="drafter folder")
    command.add_argument("--max-new-tokens", type=int, default=256, help="per answer (default 256)")
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    command.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this share")
    command.add_argument("--top-k", type=int, default=0, help="sample from this many likeliest tokens; 0 is all")
    command.add_argument("--tree", type=int, metavar="N", help="verify a tree of N drafted tokens instead of a chain")
    command.add_argument(
        "--greedy-drafts", action="store_true", help="when sampling, let the drafter propose its likeliest tokens"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _demo(options: argparse.Namespace) -> int:
    from draftsmith.demo import run_demo

    with _stoppable() as (stop, code):
        run_demo(options.minutes, options.out, stop)
        return code()


def _train(options: argparse.Namespace) -> int:
    from draftsmith.config import load_config

    if options.plan:
        return _plan(options)
    if options.machine is not None:
        raise ConfigError("--machine describes the machine of a plan; add --plan")
    config = load_config(options.config, options.set)  # before the imports that take seconds: mistakes show at once
    from draftsmith.report.session import print_launch_lines, train_and_show
    from draftsmith.target.load import TargetSpec

    with _stoppable() as (stop, code):
        result = train_and_show(config, resume=options.resume, stop=stop)
        if result.finished:
            target = TargetSpec(config.target.model).path
            print_launch_lines(target, result.folder / "draft", config.target.adapter)
        return code()


def _plan(options: argparse.Namespace) -> int:
    from draftsmith.config import load_config, load_machine
    from draftsmith.pipeline.machine import described_machine, this_machine
    from draftsmith.pipeline.plan import make_plan
    from draftsmith.report.plan import print_plan

    if options.resume:
        raise ConfigError("--plan plans a run from its start; leave out --resume")
    config = load_config(options.config, options.set)
    machine = described_machine(load_machine(options.machine)) if options.machine else this_machine()
    plan = make_plan(config, machine)
    print_plan(plan)
    if plan.refusal:
        raise InputError(plan.refusal)
    return 0


def _init(options: argparse.Namespace) -> int:
    from draftsmith.starter import write_config

    print(write_config(options.target, options.data, options.out))
    return 0


def _request(options: argparse.Namespace) -> "Request":
    from draftsmith.decode.sampling import Sampling
    from draftsmith.report.decoding import Request

    if options.max_new_tokens < 2:
        raise ConfigError("--max-new-tokens must be at least 2: the first token is the prefill's")
    if options.tree is not None and options.tree < 1:
        raise ConfigError(f"--tree is {options.tree}: give the number of drafted tokens to verify, at least 1")
    sampling = Sampling(options.temperature, options.top_p, options.top_k)
    if options.greedy_drafts and (sampling.greedy or options.tree is not None):
        raise ConfigError("--greedy-drafts changes nothing without --temperature, or with --tree; leave it out")
    return Request(
        target=options.target,
        draft=options.draft,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        tree=options.tree,
        greedy_drafts=options.greedy_drafts,
        adapter=options.adapter,
    )


def _eval(options: argparse.Namespace) -> int:
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"--json {options.json}: {options.json.parent} is not a folder; create it first")
    request = _request(options)
    from draftsmith.report.decoding import evaluate_and_show

    evaluate_and_show(request, options.prompts, options.baseline, options.limit, options.json)
    return 0


def _generate(options: argparse.Namespace) -> int:
    request = _request(options)
    from draftsmith.report.decoding import generate_and_show

    generate_and_show(request, options.prompt, options.seed)
    return 0


@contextmanager
def _stoppable() -> Iterator[tuple[threading.Event, "_ExitCode"]]:
    """The first Ctrl-C or SIGTERM asks the run to save and end; the second ends the process at once."""
    stop = threading.Event()
    code = _ExitCode()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(INTERRUPTED[signal.Signals(number)])
        code.value = INTERRUPTED[signal.Signals(number)]
        stop.set()
        print("stopping after this step; once more to abort at once", file=sys.stderr)

    previous = {number: signal.signal(number, handle) for number in INTERRUPTED}
    try:
        yield stop, code
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


class _ExitCode:
    """0, or what the signal that came asks for."""

    value = 0

    def __call__(self) -> int:
        return self.value
