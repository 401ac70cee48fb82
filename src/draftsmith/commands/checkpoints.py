"""`export` and `import`: drafter folders in the layouts of other programs."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.errors import ConfigError

if TYPE_CHECKING:
    from draftsmith.target.load import TargetSpec


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
        command.add_argument("--revision", help="hub revision of the target")
        command.add_argument("--adapter", help="LoRA adapter to merge into the target")


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

    for name in ("adapter", "revision"):
        if getattr(options, name) and not options.target:
            raise ConfigError(f"--{name} is of a target; give --target too")
    return TargetSpec(options.target, options.revision, adapter=options.adapter) if options.target else None
