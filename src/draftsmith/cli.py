"""The commands. They parse, call and print; nothing is decided here but exit codes."""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# Read by libraries when they are imported, so set before any of them is.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from draftsmith import __version__
from draftsmith.arguments import count, positive
from draftsmith.data_commands import add_inspect, add_regenerate
from draftsmith.errors import ConfigError, InputError
from draftsmith.signals import INTERRUPTED, stoppable

if TYPE_CHECKING:
    from draftsmith.target.load import TargetSpec


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `draftsmith`. Returns the exit code."""
    if sys.platform == "win32":
        print("draftsmith: Windows is not supported (no fcntl locks, no fork-safe signals); use WSL", file=sys.stderr)
        return 2
    options = _parser().parse_args(arguments)
    if (cache := _compiler_cache()) is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))  # read by the compiler when it is first needed
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

    warmup = commands.add_parser("warmup", help="compile ahead what a run needs, on every device")
    warmup.add_argument("config", type=Path, metavar="CONFIG")
    warmup.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a key of the config")
    warmup.set_defaults(command=_warmup)

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

    doctor = commands.add_parser("doctor", help="look for what makes PyTorch's compiler unsafe here, and for its harm")
    doctor.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="examine this run, too")
    doctor.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a key of the config")
    doctor.add_argument("--hunt", action="store_true", help="train a few steps and record who traces, who meets it")
    doctor.add_argument("--json", type=Path, metavar="F", help="write the findings here")
    doctor.set_defaults(command=_doctor)
    cache = commands.add_parser("cache", help="the compiler's cache: look at it, carry it to another machine, clear it")
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    info = actions.add_parser("info", help="entries, bytes, age, who wrote them, what is damaged")
    info.set_defaults(command=_cache_info)
    pack = actions.add_parser("pack", help="write the cache to one file")
    pack.add_argument("file", type=Path, metavar="FILE")
    pack.set_defaults(command=_cache_pack)
    unpack = actions.add_parser("unpack", help="add a packed cache to this machine's")
    unpack.add_argument("file", type=Path, metavar="FILE")
    unpack.set_defaults(command=_cache_unpack)
    clear = actions.add_parser("clear", help="say what it will cost, ask, and delete the cache")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.set_defaults(command=_cache_clear)
    export = commands.add_parser("export", help="write a drafter in the layout of another program")
    export.add_argument("source", metavar="DIR", help="drafter folder or hub id")
    export.add_argument("--to", required=True, choices=["zlab", "speculators"], help="layout")
    export.add_argument("out", type=Path, metavar="OUT", help="new folder")
    export.set_defaults(command=_export)

    importer = commands.add_parser(
        "import", help="take in a z-lab or speculators drafter, to evaluate or train further"
    )
    importer.add_argument("source", metavar="DIR", help="drafter folder or hub id")
    importer.add_argument("out", type=Path, metavar="OUT", help="new folder")
    importer.set_defaults(command=_import)
    for command in (export, importer):
        command.add_argument("--target", help="folder or hub id; default: the one the drafter names")
        command.add_argument("--adapter", help="LoRA adapter to merge into the target")
    return parser


def _compiler_cache() -> Path | None:
    """The user's own place, which a restart does not empty. None if it cannot be written: PyTorch's default stands."""
    caches = Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or caches.expanduser())
    except RuntimeError:  # no home
        return None
    nearest = next(folder for folder in (caches, *caches.parents) if folder.exists())
    if not caches.is_absolute() or not os.access(nearest, os.W_OK | os.X_OK):
        return None
    return caches / "draftsmith" / "compiler"
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


def _warmup(options: argparse.Namespace) -> int:
    from draftsmith.config import load_config

    config = load_config(options.config, options.set)
    from draftsmith.report.session import warm_up_and_show

    warm_up_and_show(config)
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


def _doctor(options: argparse.Namespace) -> int:
    from draftsmith.config import load_config

    if options.config is None and (options.hunt or options.set):
        raise ConfigError(f"{'--hunt' if options.hunt else '--set'} needs a CONFIG; name one")
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"--json {options.json}: {options.json.parent} is not a folder; create it first")
    config = load_config(options.config, options.set) if options.config else None
    from draftsmith.doctor.report import examine_and_show

    return examine_and_show(config, hunt=options.hunt, out=options.json)


def _cache_info(options: argparse.Namespace) -> int:
    from draftsmith.report.cache import show_info

    show_info()
    return 0


def _cache_pack(options: argparse.Namespace) -> int:
    from draftsmith.report.cache import show_pack

    show_pack(options.file)
    return 0


def _cache_unpack(options: argparse.Namespace) -> int:
    from draftsmith.report.cache import show_unpack

    show_unpack(options.file)
    return 0


def _cache_clear(options: argparse.Namespace) -> int:
    from draftsmith.report.cache import show_clear

    return 0 if show_clear(ask=not options.yes) else 1


def _export(options: argparse.Namespace) -> int:
    from draftsmith.export.convert import export_drafter

    print("\n".join(export_drafter(options.source, options.to, options.out, _target_spec(options))))
    return 0


def _import(options: argparse.Namespace) -> int:
    from draftsmith.export.convert import import_drafter

    print("\n".join(import_drafter(options.source, options.out, _target_spec(options))))
    return 0


def _target_spec(options: argparse.Namespace) -> "TargetSpec | None":
    from draftsmith.target.load import TargetSpec

    if options.adapter and not options.target:
        raise ConfigError("--adapter changes a target; give --target too")
    return TargetSpec(options.target, adapter=options.adapter) if options.target else None


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
