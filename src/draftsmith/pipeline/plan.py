"""`train --plan`: every decision and every byte of a run, from configs alone. Nothing is loaded, nothing is trained.

Decisions come from the functions that training calls (`prepare`, `topology`), sizes from `memory`. So a plan can be
made for a machine that is not here, and for a target of which only `config.json` is here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from draftsmith.config import Config
from draftsmith.data.hub import may_be_hub
from draftsmith.data.packing import RowSource
from draftsmith.data.special_tokens import choose_mask_token
from draftsmith.data.template import Document, Renderer
from draftsmith.decisions import Decision, Ledger
from draftsmith.drafter.checkpoint import find_drafter
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter
from draftsmith.errors import InputError
from draftsmith.pipeline.keeping import Keeping, choose_features, kept_memory, plan_keeping, room_refusal
from draftsmith.pipeline.machine import GIB, Machine
from draftsmith.pipeline.memory import MIB, MemoryItem, Sizes, memory_table, place_of, totals
from draftsmith.pipeline.prepare import (
    Outline,
    channel_need,
    check_capacity,
    check_published,
    choose_attention,
    choose_evaluation,
    choose_gamma,
    choose_shape,
    choose_steps,
    eval_prompts,
    make_renderer,
    outline,
    packing_settings,
    read_corpus,
)
from draftsmith.target.capture import decoder_layers
from draftsmith.target.load import frozen_weights, stored_dtype

USABLE = 0.95  # share of a memory that a plan may fill: allocators leave gaps
UNKNOWN_MASK = 0  # stands for a mask token that only the tokenizer could give; no size depends on it


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What a run would be. `refusal` is one line if it cannot be on this machine, with what would fit."""

    machine: Machine
    decisions: tuple[Decision, ...]
    sizes: Sizes
    memory: tuple[MemoryItem, ...]
    refusal: str | None


def make_plan(config: Config, machine: Machine) -> Plan:
    """Plans a run.

    Raises:
        InputError, ConfigError: something that training would refuse too, one line with the remedy.
    """
    decide = Ledger()
    known = outline(config, machine, decide)
    model = known.spec.skeleton()
    decoder_layers(model, known.target_config.num_hidden_layers)
    embedding_VH, _ = frozen_weights(known.spec, model)
    renderer, mask_token = _tokens(config, known, embedding_VH.shape[0], decide)
    shape = choose_shape(config, known.target_config, known.taps, mask_token or UNKNOWN_MASK, embedding_VH.shape[0])
    attention: str = decide(choose_attention(config, known.topology, shape.head_dim))
    decide(_start(config, shape, mask_token_known=mask_token is not None))
    decide(choose_gamma(config))
    documents = _data(config, known.target_config, renderer, mask_token, decide)
    weights = sum(parameter.numel() for parameter in model.parameters())
    cuda = known.topology.target[0].startswith("cuda")
    received = stored_dtype(known.target_config) if cuda else torch.float32
    keeping = plan_keeping(config, shape.feature_size, received, documents)
    decide(choose_features(keeping, here=machine.here))
    sizes = sizes_of(config, known, weights, shape, attention, documents, keeping)
    decide(Decision("target", f"{weights:,} weights of {sizes.itemsize} bytes", _dtype_reason(known, sizes)))
    decide(Decision("drafter", f"{sizes.drafter_weights:,} weights", f"{len(shape.layer_types)} layers; fp32 masters"))
    memory = memory_table(sizes)
    refusal = _refusal(config, machine, sizes, memory) or room_refusal(keeping, machine)
    return Plan(machine, tuple(decide.decisions), sizes, memory, refusal)


def _tokens(config: Config, known: Outline, rows: int, decide: Ledger) -> tuple[Renderer | None, int | None]:
    """What the tokenizer decides, if there is one."""
    try:
        tokenizer = known.spec.tokenizer()
    except InputError:
        reason = f"{known.spec.model} has no tokenizer that can be read"
        decide(Decision("loss mask", "decided at load", reason))
        wanted = config.drafter.mask_token
        decide(Decision("mask token", wanted or "decided at load", "set in the config" if wanted else reason))
        return None, wanted
    renderer = make_renderer(config, tokenizer)
    for decision in renderer.decisions:
        decide(decision)
    mask_token: int = decide(choose_mask_token(tokenizer, rows, config.drafter.mask_token))
    return renderer, mask_token


def _start(config: Config, shape: DrafterConfig, *, mask_token_known: bool) -> Decision:
    """How the drafter would start; a published one is checked, its weights are left alone."""
    init = config.drafter.init
    if init == "target":
        return Decision("drafter start", init, "the target's last layers, copied at load where shapes allow")
    if init == "random":
        return Decision("drafter start", init, f"set in the config; seed {config.seed}")
    check_published(shape, find_drafter(init, weights=False), init, mask_token_known=mask_token_known)
    return Decision("drafter start", init, "warm start, its config matches")


def _data(
    config: Config, target_config: Any, renderer: Renderer | None, mask_token: int | None, decide: Ledger
) -> Sequence[Document]:
    """Decides rows and steps, counted if data and tokenizer are here. Returns the documents, none if they are not."""
    settings = packing_settings(config)
    missing = next((name for name in config.data.train if _missing(name)), None)
    if missing or renderer is None or mask_token is None:
        why = f"file missing: {missing}" if missing else "no tokenizer to count tokens with"
        decide(Decision("rows", "not counted", why))
        decide(choose_steps(config, None))
        return ()
    corpus = read_corpus(config, renderer, mask_token, target_config)
    away = next((name for name in config.eval.prompts or [] if _missing(name)), None)
    if away:
        decide(Decision("evaluation", "not counted", f"file missing: {away}"))
    else:
        decide(choose_evaluation(config, len(eval_prompts(config, corpus))))
    source = RowSource(corpus.documents, settings)
    rows = f"{source.epoch_rows(0)} of {settings.row_tokens} tokens, {source.fill():.0%} full"
    decide(Decision("rows", rows, corpus.summary))
    decide(choose_steps(config, source))
    return corpus.documents


def _missing(name: str) -> bool:
    """Whether a file is not here; a name that may be a hub data set is asked for."""
    return name != "demo" and not Path(name.partition(":")[0]).exists() and not may_be_hub(name)


def sizes_of(
    config: Config,
    known: Outline,
    weights: int,
    shape: DrafterConfig,
    attention: str,
    documents: Sequence[Document],
    keeping: Keeping,
) -> Sizes:
    """The numbers that memory follows from."""
    with torch.device("meta"):
        parameters = list(Drafter(shape).parameters())
    packing = packing_settings(config)
    return Sizes(
        topology=known.topology,
        target_weights=weights,
        target_layers=known.target_config.num_hidden_layers,
        itemsize=keeping.received.itemsize,
        mlp_width=mlp_width(known.target_config),
        shape=shape,
        attention=attention,
        checkpointing=config.drafter.checkpointing,
        drafter_weights=sum(p.numel() for p in parameters),
        matrices=tuple((p.shape[0], p.shape[1]) for p in parameters if p.ndim == 2),
        optimizer=config.train.optimizer,
        row_tokens=packing.row_tokens,
        row_anchors=packing.row_anchors,
        batch_rows=config.pipeline.target_batch_rows,
        channel_bytes=config.pipeline.channel_mib * MIB,
        eval_tokens=(config.data.row_tokens + config.eval.max_new_tokens) if config.eval.every else 0,
        document_tokens=sum(len(document.tokens_T) for document in documents),
        kept=kept_memory(keeping, len(known.topology.target)),
    )


def mlp_width(target_config: Any) -> int:
    """MLP columns that one token uses: those of its experts for a mixture, 4 x hidden where the config says nothing."""
    dense = getattr(target_config, "intermediate_size", None) or 4 * target_config.hidden_size
    experts = getattr(target_config, "num_experts_per_tok", None) or 0
    return int(max(dense, experts * (getattr(target_config, "moe_intermediate_size", None) or dense)))


def _dtype_reason(known: Outline, sizes: Sizes) -> str:
    if not sizes.cuda:
        return "the CPU computes in fp32"
    if getattr(known.target_config, "quantization_config", None):
        return "counted as if it were not quantized: an upper bound"
    if getattr(known.target_config, "dtype", None) is None:
        return "its config does not say a dtype"
    return f"its config says {stored_dtype(known.target_config)}".replace("torch.", "")


def _refusal(config: Config, machine: Machine, sizes: Sizes, memory: tuple[MemoryItem, ...]) -> str | None:
    """Why this cannot run here and what would fit, in one line; None if it fits."""
    short = shortages(memory, machine)
    if not short:
        try:
            check_capacity(config, sizes.shape.feature_size * sizes.itemsize)
        except InputError as error:
            return str(error)
        return None
    weights, first = sizes.target_weights * sizes.itemsize, place_of(sizes.topology.target[0])
    alone = first != "host" and weights > USABLE * machine.capacity(first)
    place = first if alone else max(short, key=lambda place: short[place] / machine.capacity(place))
    need, capacity = short[place], machine.capacity(place)
    has = f"{gib(capacity)} GiB ({gib(capacity * USABLE)} usable)"
    most = max(short[p] for p in short if (p == "host") == (place == "host"))
    enough = f"{ceil(most / USABLE / GIB)} GiB"
    if alone:
        return (
            f"target.model {config.target.model} needs {gib(weights)} GiB for its weights alone, {place} has {has}: a "
            f"target spread over several devices is not supported; would fit: devices of at least {enough}"
        )
    largest = sorted((i for i in memory if i.place == place), key=lambda i: -i.nbytes)[:3]
    parts = ", ".join(f"{item.name} {gib(item.nbytes)}" for item in largest)
    change = next((text for text, items in _changes(config, sizes) if not shortages(items, machine)), None)
    where = "a host" if place == "host" else "devices"
    would = f"{change}, or {where} of at least {enough}" if change else f"{where} of at least {enough}"
    return f"{place} needs {gib(need)} GiB and has {has}; largest: {parts}; would fit: {would}"


def shortages(memory: tuple[MemoryItem, ...], machine: Machine) -> dict[str, int]:
    """Bytes needed at each place that has too few."""
    return {p: need for p, need in totals(memory).items() if need > USABLE * machine.capacity(p)}


def _changes(config: Config, sizes: Sizes) -> Iterator[tuple[str, tuple[MemoryItem, ...]]]:
    """Changes to the config that need less memory, the mildest first, each with its table."""
    if config.features == "memory":
        sizes = replace(sizes, kept=None)
        yield "features=online", memory_table(sizes)
    least = ceil(channel_need(config, sizes.shape.feature_size * sizes.itemsize) / MIB)
    if least < config.pipeline.channel_mib:
        sizes = replace(sizes, channel_bytes=least * MIB)
        yield f"pipeline.channel_mib={least}", memory_table(sizes)
    workers = sizes.topology.workers
    if not sizes.cuda and workers > 2:
        one = replace(sizes.topology, target=sizes.topology.target[:1], drafter=sizes.topology.drafter[:1])
        sizes = replace(sizes, topology=one)
        yield "topology=1+1", memory_table(sizes)
    if sizes.checkpointing == "none":
        yield "drafter.checkpointing=layer", memory_table(replace(sizes, checkpointing="layer"))
    for share in (0.75, 0.5, 0.25, 0.125):
        tokens = int(share * config.data.row_tokens)
        if tokens < 16:
            return
        data = config.data.model_copy(update={"row_tokens": tokens, "row_anchors": None})
        anchors = packing_settings(config.model_copy(update={"data": data})).row_anchors
        smaller = replace(sizes, row_tokens=tokens, row_anchors=anchors)
        yield f"data.row_tokens={tokens} data.row_anchors={anchors}", memory_table(smaller)


def gib(nbytes: float) -> str:
    """With one decimal."""
    return f"{nbytes / GIB:.1f}"
