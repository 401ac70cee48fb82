"""The commands. They parse, call and print; nothing is decided here but exit codes."""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

# Read by libraries when they are imported, so set before any of them is.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from draftsmith import __version__
from draftsmith.arguments import count, positive
from draftsmith.data_commands import add_inspect, add_regenerate
from draftsmith.errors import ConfigError, InputError
from draftsmith.signals import INTERRUPTED, stoppable


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
    demo.add_argument("--minutes", type=positive, default=5.0, help="training time (default 5)")
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
    start.add_argument("--data", required=True, nargs="+", metavar="F", help="files or folders of conversations")
    start.add_argument("--out", type=Path, default=Path("draftsmith.yaml"), help="default draftsmith.yaml")
    start.set_defaults(command=_init)

    evaluate = commands.add_parser("eval", help="measure a drafter side by side with plain decoding")
    evaluate.add_argument("--target", required=True, help="folder or hub id; `demo` is the embedded one")
    evaluate.add_argument("--adapter", help="LoRA adapter to merge into the target")
    evaluate.add_argument("--draft", required=True, type=Path, help="drafter folder")
    evaluate.add_argument("--prompts", required=True, nargs="+", metavar="F", help="prompt files")
    evaluate.add_argument("--max-new-tokens", type=int, default=256)
    evaluate.add_argument("--json", type=Path, metavar="F", help="write the figures here")
    evaluate.set_defaults(command=_eval)

    data = commands.add_parser("data", help="prepare training data").add_subparsers(required=True, metavar="COMMAND")
    prepare = data.add_parser("prepare", help="conversations to token ids and loss masks, once and in parallel")
    prepare.add_argument("files", nargs="+", metavar="F", help="file, folder or hub data set; `demo`")
    prepare.add_argument("--target", required=True, help="folder or hub id whose tokenizer and template to use")
    prepare.add_argument("--revision", help="hub revision of the target")
    prepare.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    prepare.add_argument("--form", help="how records are read, instead of finding out for each file")
    prepare.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="the template's switch for thinking")
    prepare.add_argument(
        "--template-argument", action="append", default=[], metavar="k=v", help="another variable of the template"
    )
    prepare.add_argument("--template-date", help="what templates that print the date print (YYYY-MM-DD)")
    prepare.add_argument("--processes", type=count, help="default: as many as cores, one for small data")
    prepare.add_argument("--prompts", nargs="+", default=[], metavar="F", help="evaluation prompts to look for")
    prepare.add_argument("--drop-contaminated", action="store_true", help="reject conversations that contain one")
    prepare.set_defaults(command=_prepare)
    add_regenerate(data.add_parser("regenerate", help="let the target answer: conversations with its own turns"))
    add_inspect(data.add_parser("inspect", help="what is learned of one conversation, in colours or as HTML"))
    return parser


def _demo(options: argparse.Namespace) -> int:
    from draftsmith.demo import run_demo

    with stoppable() as (stop, code):
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

    with stoppable() as (stop, code):
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


def _eval(options: argparse.Namespace) -> int:
    from draftsmith.report.session import evaluate_and_show

    if options.max_new_tokens < 2:
        raise ConfigError("--max-new-tokens must be at least 2: the first token is the prefill's")
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"--json {options.json}: {options.json.parent} is not a folder; create it first")
    evaluate_and_show(
        options.target, options.draft, options.prompts, options.max_new_tokens, options.json, options.adapter
    )
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from draftsmith.data.settings import parse_settings
    from draftsmith.report.preparing import PrepareOptions, prepare_and_show

    if options.drop_contaminated and not options.prompts:
        raise ConfigError("--drop-contaminated needs the evaluation prompts to look for: add --prompts")
    settings = parse_settings(options.thinking, options.template_argument, options.template_date)
    with stoppable() as (stop, code):
        prepare_and_show(
            PrepareOptions(
                files=options.files,
                target=options.target,
                revision=options.revision,
                out=options.out,
                form=options.form,
                template=settings,
                processes=options.processes,
                prompts=options.prompts,
                drop_contaminated=options.drop_contaminated,
            ),
            stop,
        )
        return code()
