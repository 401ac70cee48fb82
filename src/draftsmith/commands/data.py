"""`data prepare`, `data regenerate` and `data inspect`."""

import argparse
from pathlib import Path

from draftsmith.commands.arguments import count, positive, share_of, whole
from draftsmith.commands.signals import stoppable
from draftsmith.errors import ConfigError, written_below


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    data = commands.add_parser("data", help="prepare training data").add_subparsers(required=True, metavar="COMMAND")
    _add_prepare(data.add_parser("prepare", help="conversations to token ids and loss masks, once and in parallel"))
    _add_regenerate(data.add_parser("regenerate", help="let the target answer: conversations with its own turns"))
    _add_inspect(data.add_parser("inspect", help="what is learned of one conversation, in colours or as HTML"))


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="F", help="file, folder or hub data set; `demo`")
    parser.add_argument("--target", required=True, help="folder or hub id whose tokenizer and template to use")
    parser.add_argument("--revision", help="hub revision of the target")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    parser.add_argument("--form", help="how records are read, instead of finding out for each file")
    _add_template(parser)
    parser.add_argument("--processes", type=count, help="default: as many as cores, one for small data")
    parser.add_argument("--prompts", nargs="+", default=[], metavar="F", help="evaluation prompts to look for")
    parser.add_argument("--drop-contaminated", action="store_true", help="reject conversations that contain one")
    parser.set_defaults(command=_prepare)


def _prepare(options: argparse.Namespace) -> int:
    from draftsmith.data.settings import parse_settings
    from draftsmith.report.preparing import PrepareOptions, prepare_and_show

    if options.drop_contaminated and not options.prompts:
        raise ConfigError("--drop-contaminated needs the evaluation prompts to look for: add --prompts")
    settings = parse_settings(options.thinking, options.template_argument, options.template_date)
    with stoppable() as (stop, code), written_below(options.out):
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


def _add_regenerate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="F", help="conversations or prompts: file, folder, hub data set, `demo`"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="folder to write; goes on where it stopped"
    )
    parser.add_argument("--form", help="how records are read, instead of finding out for each file")
    parser.add_argument("--limit", type=count, help="only the first records")
    parser.add_argument("--retry-errors", action="store_true", help="ask records that ended in an error again")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--target", help="folder or hub id of a model to run here; `demo` is the embedded one")
    who.add_argument("--server", nargs="+", metavar="URL", help="OpenAI-compatible servers of one model")
    drawn = parser.add_argument_group("sampling")
    drawn.add_argument("--max-new-tokens", type=count, default=2048, help="longer answers are errors (default 2048)")
    drawn.add_argument("--temperature", type=share_of(2.0), default=0.0, help="0 (default): greedy")
    drawn.add_argument("--top-p", type=share_of(1.0))
    drawn.add_argument("--top-k", type=count)
    drawn.add_argument("--seed", type=int)
    local = parser.add_argument_group("with --target")
    local.add_argument("--revision", help="hub revision of the target")
    local.add_argument("--adapter", help="LoRA adapter to merge into the target")
    local.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    local.add_argument("--batch-size", type=count, default=16, help="prompts to a batch (default 16)")
    _add_template(local)
    served = parser.add_argument_group("with --server")
    served.add_argument("--model", help="default: the first one that the first server names")
    served.add_argument("--concurrency", type=count, default=16, help="requests at a time (default 16)")
    served.add_argument("--attempts", type=count, default=6, help="for each answer (default 6)")
    served.add_argument("--timeout", type=positive, default=600.0, help="seconds for a whole response (default 600)")
    served.add_argument(
        "--request-field", action="append", default=[], metavar="k=v", help="more of the request's body"
    )
    key = served.add_mutually_exclusive_group()
    key.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the key")
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="file that holds the key")
    parser.set_defaults(command=_regenerate)


def _regenerate(options: argparse.Namespace) -> int:
    from draftsmith.data.regenerate.run import Inputs
    from draftsmith.data.regenerate.server import ServerSettings
    from draftsmith.data.regenerate.tasks import Sampling
    from draftsmith.data.settings import parse_settings
    from draftsmith.report.regenerating import LocalOptions, parse_fields, read_api_key, regenerate_and_show

    given = options
    sampling = Sampling(given.max_new_tokens, given.temperature, given.top_p, given.top_k, given.seed)
    how: LocalOptions | ServerSettings
    if given.server:
        how = ServerSettings(
            urls=tuple(given.server),
            model=given.model,
            concurrency=given.concurrency,
            attempts=given.attempts,
            timeout_s=given.timeout,
            first_wait_s=1.0,
            fields=parse_fields(given.request_field),
            api_key=read_api_key(given.api_key_env, given.api_key_file),
        )
    else:
        settings = parse_settings(given.thinking, given.template_argument, given.template_date)
        how = LocalOptions(given.target, given.revision, given.adapter, given.device, given.batch_size, settings)
    inputs = Inputs(given.files, given.form, given.limit)
    with stoppable() as (stop, code), written_below(options.out):
        regenerate_and_show(inputs, given.out, how, sampling, stop, retry_errors=given.retry_errors)
        return code()


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="F", help="conversations; `demo` are the embedded ones")
    parser.add_argument("--target", required=True, help="folder or hub id whose tokenizer and template to use")
    parser.add_argument("--revision", help="hub revision of the target")
    parser.add_argument("--line", type=count, help="default: the first conversation that can be used")
    parser.add_argument("--html", type=Path, metavar="F", help="write a page instead of printing")
    parser.add_argument("--form", help="how records are read, instead of finding out for each file")
    _add_template(parser)
    blocks = parser.add_argument_group("blocks, as in a config")
    blocks.add_argument("--block-size", type=count, default=16, help="default 16")
    blocks.add_argument("--anchor-density", type=share_of(1.0), default=0.25, help="default 0.25")
    blocks.add_argument("--seed", type=whole, default=0)
    blocks.add_argument("--epoch", type=whole, default=0)
    parser.set_defaults(command=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    from draftsmith.data.settings import parse_settings
    from draftsmith.report.inspecting import InspectOptions, inspect_and_show

    given = options
    inspect_and_show(
        InspectOptions(
            file=given.file,
            line=given.line,
            target=given.target,
            revision=given.revision,
            form=given.form,
            template=parse_settings(given.thinking, given.template_argument, given.template_date),
            block_size=given.block_size,
            density=given.anchor_density,
            seed=given.seed,
            epoch=given.epoch,
            html=given.html,
        )
    )
    return 0


def _add_template(group: argparse._ActionsContainer) -> None:
    group.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="the template's switch for thinking")
    group.add_argument("--template-argument", action="append", default=[], metavar="k=v", help="its other variables")
    group.add_argument("--template-date", help="what templates that print the date print (YYYY-MM-DD)")
