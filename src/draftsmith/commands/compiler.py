"""`doctor` and `cache`: PyTorch's compiler, its faults and its cache."""

import argparse
from pathlib import Path

from draftsmith.commands.arguments import check_json
from draftsmith.errors import ConfigError


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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


def _doctor(options: argparse.Namespace) -> int:
    from draftsmith.config import load_config

    if options.config is None and (options.hunt or options.set):
        raise ConfigError(f"{'--hunt' if options.hunt else '--set'} needs a CONFIG; name one")
    check_json(options.json)
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
