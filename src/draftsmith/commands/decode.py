"""`eval`."""

import argparse
from pathlib import Path

from draftsmith.errors import ConfigError


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    evaluate = commands.add_parser("eval", help="measure a drafter side by side with plain decoding")
    evaluate.add_argument("--target", required=True, help="folder or hub id; `demo` is the embedded one")
    evaluate.add_argument("--adapter", help="LoRA adapter to merge into the target")
    evaluate.add_argument("--draft", required=True, type=Path, help="drafter folder")
    evaluate.add_argument("--prompts", required=True, nargs="+", metavar="F", help="prompt files")
    evaluate.add_argument("--max-new-tokens", type=int, default=256)
    evaluate.add_argument("--json", type=Path, metavar="F", help="write the figures here")
    evaluate.set_defaults(command=_eval)


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
