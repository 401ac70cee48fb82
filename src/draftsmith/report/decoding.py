"""`draftsmith eval` and `draftsmith generate`: a target, a drafter, and what is decoded with them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.data.conversations import Prompt, read_prompts
from draftsmith.data.template import Renderer
from draftsmith.decisions import Ledger
from draftsmith.decode.evaluate import Contender, EvalReport, evaluate
from draftsmith.decode.figures import speed, tau
from draftsmith.decode.methods import Chain, LookUp, Method, Tree
from draftsmith.decode.probe import probe_target
from draftsmith.decode.sampling import GREEDY, Sampling
from draftsmith.decode.speculate import decode
from draftsmith.drafter.checkpoint import check_target, load_drafter
from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError, InputError
from draftsmith.pipeline.machine import this_machine
from draftsmith.pipeline.topology import Topology, choose_device, choose_threads, choose_topology, device_of
from draftsmith.report.console import console, say
from draftsmith.report.session import load_pair, warn_if_foreign
from draftsmith.report.stream import TextStream
from draftsmith.report.table import eval_table
from draftsmith.target.load import Target, TargetSpec

LOOK_UP, CHAIN = "ngram", "chain"  # names of baselines; a folder of that name is ./ngram


@dataclass(frozen=True, slots=True)
class Request:
    """What to decode with. `tree` is a budget of drafted tokens, None for chains; `greedy_drafts` lets the drafter
    propose its most likely tokens also when sampling."""

    target: str
    draft: Path
    max_new_tokens: int
    sampling: Sampling = GREEDY
    tree: int | None = None
    greedy_drafts: bool = False
    revision: str | None = None
    adapter: str | None = None

    @property
    def spec(self) -> TargetSpec:
        return TargetSpec(self.target, self.revision, adapter=self.adapter)

    def method(self, drafter: Drafter) -> Method:
        return Chain(drafter, self.greedy_drafts) if self.tree is None else Tree(drafter, self.tree)


def open_pair(request: Request) -> tuple[Target, Drafter]:
    """Both models, with as many threads as a training run would give them, so that figures can be compared."""
    machine, decide = this_machine(), Ledger()
    kind = decide(choose_device("auto", len(machine.devices)))
    topology: Topology = decide(choose_topology("auto", kind, len(machine.devices)))
    threads = choose_threads(None, topology, machine.cores)
    torch.set_num_threads(decide(threads))
    say(str(threads))
    return load_pair(request.spec, request.draft, device_of(topology.target[0]))


def evaluate_and_show(
    request: Request, prompt_files: Sequence[str], baselines: Sequence[str], limit: int | None, out: Path | None
) -> None:
    """`draftsmith eval`: decodes, prints the table, writes the JSON.

    Raises:
        ConfigError: a baseline is neither `ngram` nor a folder.
    """
    for name in baselines:
        if name != LOOK_UP and not Path(name).is_dir():
            raise ConfigError(f"--baseline {name}: give {LOOK_UP} (look-up in prompt and answer) or a drafter folder")
    read = read_prompts(prompt_files, limit)
    target, drafter = open_pair(request)
    renderer = Renderer(target.tokenizer)
    prompts = [renderer.prompt_ids(prompt) for prompt in read]
    others = {CHAIN: Contender(target, Chain(drafter))} if request.tree is not None else {}
    others |= {name: baseline(name, target, drafter) for name in baselines}
    report = evaluate_with_status(
        target, request.method(drafter), prompts, request.max_new_tokens, request.sampling, others
    )
    console.print(eval_table(report, name="drafter" if request.tree is None else f"tree {request.tree}"))
    if out is not None:
        try:
            out.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"--json {out} cannot be written: {error.strerror}; the table above holds the figures"
            ) from None


def baseline(name: str, target: Target, drafter: Drafter) -> Contender:
    """What `--baseline` names: look-up in the text so far, or the folder of a second drafter.

    Raises:
        InputError: a drafter that cannot be loaded, or for another target.
    """
    if name == LOOK_UP:
        return Contender(target, LookUp(drafter.config.block_size))
    folder = Path(name)
    second = load_drafter(folder, target.device)
    check_target(second.config, target.config, f"--baseline {folder}", target.spec.model)
    warn_if_foreign(target, folder)
    return Contender(target.tapped(second.config.target_layer_ids), Chain(second))


def evaluate_with_status(
    target: Target,
    method: Method,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    others: dict[str, Contender] | None = None,
) -> EvalReport:
    """Evaluates, showing how far it is."""
    with console.status("decoding") as status:
        return evaluate(
            target,
            method,
            prompts,
            max_new_tokens,
            sampling,
            others,
            on_prompt=lambda done: status.update(f"decoding {done} / {len(prompts)}"),
        )


def generate_and_show(request: Request, text: str, seed: int) -> None:
    """`draftsmith generate`: the answer as it is decoded, accepted drafts coloured block by block.

    A target with a chat template gets the text as a user's turn, another one as it stands.
    """
    target, drafter = open_pair(request)
    method = request.method(drafter)
    probe_target(target, trees=method.branches)
    chat = bool(target.tokenizer.chat_template)
    prompt = Prompt(messages=({"role": "user", "content": text},)) if chat else Prompt(text=text)
    ids = Renderer(target.tokenizer).prompt_ids(prompt)
    stream = TextStream(target.tokenizer, console)
    got = decode(target, method, ids, request.max_new_tokens, request.sampling, seed, stream.round)
    stream.close()
    drafted = sum(got.accepted) / len(got.tokens)
    say(
        f"{len(got.tokens)} tokens, {drafted:.0%} of them drafted; τ {tau([got]):.2f} in {len(got.rounds)} rounds; "
        f"{speed([got]):.0f} tokens/s"
    )
