"""`demo`, `train`, `warmup`, `init`."""

import argparse
from pathlib import Path

from draftsmith.commands.arguments import positive
from draftsmith.commands.signals import stoppable
from draftsmith.errors import ConfigError, InputError


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
