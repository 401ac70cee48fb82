"""`eval` and `generate`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.commands.arguments import check_json, count, whole
from draftsmith.errors import ConfigError

if TYPE_CHECKING:
    from draftsmith.report.decoding import Request

MOST_NEW_TOKENS, MOST_IN_A_TREE = 2**20, 4096  # caches and masks of that size are allocated before the first token


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    evaluate = commands.add_parser("eval", help="measure a drafter side by side with plain decoding")
    _add_decoding(evaluate)
    evaluate.add_argument(
        "--prompts", required=True, nargs="+", metavar="F", help="prompt files, or demo, humaneval, gsm8k, mtbench"
    )
    evaluate.add_argument("--limit", type=count, metavar="N", help="only the first N prompts of each file")
    evaluate.add_argument(
        "--baseline", nargs="+", default=[], metavar="B", help="also measure: ngram (look-up), other drafter folders"
    )
    evaluate.add_argument("--json", type=Path, metavar="F", help="write the figures here")
    evaluate.set_defaults(command=_eval)

    generate = commands.add_parser("generate", help="answer a prompt, showing which tokens were drafted")
    _add_decoding(generate)
    generate.add_argument("--seed", type=whole, default=0, help="of the draws (default 0)")
    generate.add_argument("prompt", metavar="PROMPT")
    generate.set_defaults(command=_generate)


def _add_decoding(command: argparse.ArgumentParser) -> None:
    """What `eval` and `generate` decode with."""
    command.add_argument("--target", required=True, help="folder or hub id; `demo` is the embedded one")
    command.add_argument("--revision", help="hub revision of the target")
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


def _request(options: argparse.Namespace) -> "Request":
    from draftsmith.decode.sampling import Sampling
    from draftsmith.report.decoding import Request

    if options.max_new_tokens < 2:
        raise ConfigError("--max-new-tokens must be at least 2: the first token is the prefill's")
    if options.max_new_tokens > MOST_NEW_TOKENS:
        raise ConfigError(f"--max-new-tokens is {options.max_new_tokens}: give at most {MOST_NEW_TOKENS}")
    if options.tree is not None and not 1 <= options.tree <= MOST_IN_A_TREE:
        raise ConfigError(
            f"--tree is {options.tree}: give the number of drafted tokens to verify, 1 to {MOST_IN_A_TREE}"
        )
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
        revision=options.revision,
        adapter=options.adapter,
    )


def _eval(options: argparse.Namespace) -> int:
    check_json(options.json)
    request = _request(options)
    from draftsmith.report.decoding import evaluate_and_show

    evaluate_and_show(request, options.prompts, options.baseline, options.limit, options.json)
    return 0


def _generate(options: argparse.Namespace) -> int:
    request = _request(options)
    from draftsmith.report.decoding import generate_and_show

    generate_and_show(request, options.prompt, options.seed)
    return 0
