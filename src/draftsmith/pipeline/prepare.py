"""From a config to a job: everything is read, checked and decided here, before a single thread exists."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.config import MOST_THREADS, Config, Devices
from draftsmith.data.conversations import Prompt, read_prompts
from draftsmith.data.corpus import Corpus, build_corpus
from draftsmith.data.packing import PackingSettings, RowSource
from draftsmith.data.settings import TemplateSettings
from draftsmith.data.special_tokens import choose_mask_token
from draftsmith.data.template import Renderer
from draftsmith.decisions import Decision, Ledger
from draftsmith.decode.probe import probe_target
from draftsmith.drafter.anchors import anchor_count
from draftsmith.drafter.attention import BLOCKWISE, Backend
from draftsmith.drafter.attention.flex import MIN_HEAD_DIM, flex_backend
from draftsmith.drafter.checkpoint import find_drafter, read_tensors
from draftsmith.drafter.config import FULL, SLIDING, DrafterConfig
from draftsmith.drafter.init import init_from_checkpoint, init_from_target, random_init
from draftsmith.drafter.loss import default_gamma
from draftsmith.drafter.model import Drafter
from draftsmith.drafter.traps import FIXED_ROPE
from draftsmith.errors import ConfigError, InputError
from draftsmith.pipeline.keeping import Keeping, choose_features, plan_keeping
from draftsmith.pipeline.machine import Machine, this_machine
from draftsmith.pipeline.store import StoreIdentity
from draftsmith.pipeline.topology import Topology, choose_device, choose_threads, choose_topology, device_of
from draftsmith.target.capture import check_taps, decoder_layers, default_taps
from draftsmith.target.load import Target, TargetSpec, load_target


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """A run, ready to start. `drafter` holds the initial weights on the host, in fp32. `data_fingerprint` is that of
    the documents."""

    config: Config
    topology: Topology
    threads: int
    target: Target
    drafter: Drafter
    corpus: Corpus
    data_fingerprint: str
    source: RowSource
    keeping: Keeping
    prompts: tuple[tuple[int, ...], ...]
    steps: int
    gamma: float
    decisions: tuple[Decision, ...]

    @property
    def feature_bytes_per_token(self) -> int:
        return self.drafter.config.feature_size * self.target.embedding_VH.element_size()

    @property
    def features_identity(self) -> StoreIdentity:
        """What kept features follow from."""
        dtype = str(self.keeping.kept).removeprefix("torch.")
        return StoreIdentity(self.target.fingerprint, self.target.taps, dtype, self.data_fingerprint)


def prepare(config: Config, resolved: "Resolved | None" = None) -> Job:
    """Loads the target and the data and makes every choice, each with its reason.

    Args:
        config: checked.
        resolved: what an interrupted run had decided; rules where the config leaves the choice open.

    Raises:
        InputError, ConfigError: one line with the remedy.
    """
    decide = Ledger()
    known = outline(config, this_machine(), decide, resolved)
    torch.set_num_threads(known.threads)
    target = load_target(known.spec, known.taps, device_of(known.topology.target[0]))
    probe_target(target)  # refuses a target that no drafter could serve, before any training
    if known.spec.adapter:
        decide(Decision("adapter", known.spec.adapter, "set in the config; merged into the target"))
    renderer = make_renderer(config, target.tokenizer)
    for decision in renderer.decisions:
        decide(decision)
    mask_token = decide(choose_mask_token(target.tokenizer, target.embedding_VH.shape[0], config.drafter.mask_token))
    shape = choose_shape(config, known.target_config, known.taps, mask_token, target.embedding_VH.shape[0])
    backend = make_backend(config, decide(choose_attention(config, known.topology, shape.head_dim)))
    drafter = Drafter(shape, backend, checkpointing=config.drafter.checkpointing == "layer")
    decide(start_drafter(drafter, config, target))
    gamma: float = decide(choose_gamma(config))

    held_out = resolved.held_out if resolved is not None else None
    corpus = read_corpus(config, renderer, mask_token, known.target_config, held_out)
    prompts = eval_prompts(config, corpus)
    decide(choose_evaluation(config, len(prompts)))
    source = RowSource(corpus.documents, packing_settings(config))
    keeping = plan_keeping(config, shape.feature_size, target.embedding_VH.dtype, corpus.documents)
    decide(choose_features(keeping))
    return Job(
        config=config,
        topology=known.topology,
        threads=known.threads,
        target=target,
        drafter=drafter,
        corpus=corpus,
        data_fingerprint=corpus.fingerprint,
        source=source,
        keeping=keeping,
        prompts=tuple(tuple(renderer.prompt_ids(prompt)) for prompt in prompts[: config.eval.limit]),
        steps=decide(choose_steps(config, source)),
        gamma=gamma,
        decisions=tuple(decide.decisions),
    )


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a run that is to be resumed had decided: worker names, threads, and whether it holds out prompts of its own
    (those must stay out of the training rows even if it is now evaluated on others)."""

    topology: Mapping[str, list[str]]
    threads: int
    held_out: bool

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= MOST_THREADS:
            raise InputError(f"resume: the checkpoint says {self.threads} threads per worker; remove this checkpoint")


@dataclass(frozen=True, eq=False, slots=True)
class Outline:
    """What config, machine and the target's `config.json` decide, before weights, tokenizer or data are read."""

    topology: Topology
    threads: int
    spec: TargetSpec
    target_config: Any
    taps: tuple[int, ...]


def outline(config: Config, machine: Machine, decide: Ledger, resolved: Resolved | None = None) -> Outline:
    """The first decisions of a run, and of its plan."""
    device = decide(choose_device(config.device, len(machine.devices)))
    wanted: str | Mapping[str, list[str]] = (
        config.topology.model_dump() if isinstance(config.topology, Devices) else config.topology
    )
    if resolved is not None and wanted == "auto":
        kept = choose_topology(resolved.topology, device, len(machine.devices))
        topology: Topology = decide(replace(kept, reason="as before the interruption"))
    else:
        topology = decide(choose_topology(wanted, device, len(machine.devices)))
    if resolved is not None and config.pipeline.threads is None:
        threads: int = decide(Decision("threads per worker", resolved.threads, "as before the interruption"))
    else:
        threads = decide(choose_threads(config.pipeline.threads, topology, machine.cores))
    given = config.target
    spec = TargetSpec(given.model, given.revision, given.trust_remote_code, given.adapter)
    target_config = spec.config()
    taps = decide(choose_taps(config.drafter.taps, target_config.num_hidden_layers))
    return Outline(topology, threads, spec, target_config, taps)


def choose_gamma(config: Config) -> Decision:
    """Decay of the slot weights."""
    if config.train.gamma:
        return Decision("gamma", config.train.gamma, "set in the config")
    return Decision("gamma", default_gamma(config.drafter.block_size), "the paper's, by B")


def choose_taps(wanted: list[int] | None, layers: int) -> Decision:
    """Explicit taps, checked, or the rule's."""
    if wanted is not None:
        return Decision("taps", check_taps(wanted, layers), "set in the config")
    taps = default_taps(layers)
    reason = f"the paper's rule for {layers} layers"
    return Decision("taps", taps, reason if len(taps) == 5 else f"{reason}; {len(taps)} of 5, the others repeat")


def choose_shape(
    config: Config, target_config: Any, taps: tuple[int, ...], mask_token: int, vocab_size: int
) -> DrafterConfig:
    """The drafter's shape: the target's own where a drafter has a counterpart."""
    hidden, heads = target_config.hidden_size, target_config.num_attention_heads
    intermediate = config.drafter.intermediate_size or getattr(target_config, "intermediate_size", None)
    if not isinstance(intermediate, int):
        raise ConfigError("drafter.intermediate_size: the target's config has no intermediate_size; set it")
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(target_config, "head_dim", None) or hidden // heads,
        vocab_size=vocab_size,
        rms_norm_eps=getattr(target_config, "rms_norm_eps", 1e-6),
        rope_parameters=_rope(target_config),
        max_position_embeddings=target_config.max_position_embeddings,
        attention_bias=False,
        layer_types=tuple(config.drafter.layer_types or [FULL] * config.drafter.layers),
        sliding_window=config.drafter.sliding_window,
        block_size=config.drafter.block_size,
        target_layer_ids=taps,
        num_target_layers=target_config.num_hidden_layers,
        mask_token_id=mask_token,
    )


def choose_attention(config: Config, topology: Topology, head_dim: int) -> Decision:
    """How the drafter attends in training: `flex` or `blockwise`.

    Raises:
        ConfigError: `flex` was asked for where it cannot train.
    """
    wanted, name = config.drafter.attention, "attention"
    lack = None
    if device_of(topology.drafter[0]).type == "cpu":
        lack = "PyTorch's flex attention has no backward on the CPU"
    elif head_dim < MIN_HEAD_DIM:
        lack = f"flex attention on CUDA takes no heads of {head_dim}, only from {MIN_HEAD_DIM}"
    if wanted == "flex" and lack:
        raise ConfigError(f"drafter.attention: flex cannot train here: {lack}; use auto or blockwise")
    if wanted != "auto":
        return Decision(name, wanted, "set in the config")
    if lack:
        return Decision(name, "blockwise", f"needs no compiler; {lack}")
    return Decision(name, "flex", "CUDA: one compiled kernel for all blocks of a row")


def make_backend(config: Config, attention: str) -> Backend:
    """The backend that `choose_attention` chose, for this config's rows."""
    if attention == "blockwise":
        return BLOCKWISE
    packing = packing_settings(config)
    return flex_backend(packing.row_tokens, packing.row_anchors)


def _rope(target_config: Any) -> dict[str, Any]:
    """The target's rotary parameters if a Qwen3 drafter can have them, else plain ones with its base.

    Targets that rotate a part of each head, or differently per layer kind, have no counterpart in the checkpoint; those
    whose frequencies depend on the sequence's length would be trained at another length than served.
    """
    rope = dict(getattr(target_config, "rope_parameters", None) or {})
    plain = rope.get("rope_type", "default") in FIXED_ROPE and rope.get("partial_rotary_factor", 1.0) == 1.0
    if not plain or "rope_theta" not in rope:
        nested = next((v for v in rope.values() if isinstance(v, Mapping) and "rope_theta" in v), rope)
        return {"rope_type": "default", "rope_theta": float(nested.get("rope_theta", 10_000.0))}
    return rope


def start_drafter(drafter: Drafter, config: Config, target: Target) -> Decision:
    """Fills the drafter's initial weights as `drafter.init` says."""
    init = config.drafter.init
    if init == "random":
        random_init(drafter, config.seed)
        return Decision("drafter start", "random", f"set in the config; seed {config.seed}")
    if init == "target":
        layers = decoder_layers(target.model, target.config.num_hidden_layers)
        return init_from_target(drafter, layers, _final_norm(target.model), config.seed)
    folder = find_drafter(init)
    check_published(drafter.config, folder, init)
    return init_from_checkpoint(drafter, read_tensors(folder), init)


def check_published(ours: DrafterConfig, folder: Path, init: str, *, mask_token_known: bool = True) -> None:
    """A drafter to start from must do the same job: what tensor shapes do not show is compared here.

    Raises:
        ConfigError: it differs; says in what.
    """
    published = DrafterConfig.read(folder)
    if published.is_causal is not None:
        raise ConfigError(
            f"drafter.init {init}: its is_causal is {published.is_causal}; such a drafter can be evaluated, not trained"
        )
    keys = ["target_layer_ids", "block_size", "layer_types", "sliding_window"]
    for key in [*keys, "mask_token_id"] if mask_token_known else keys:
        mine, theirs = getattr(ours, key), getattr(published, key)
        if mine != theirs and not (key == "sliding_window" and SLIDING not in published.layer_types):
            raise ConfigError(
                f"drafter.init {init}: its {key} is {theirs}, this run's is {mine}; set the drafter section to match"
            )


def _final_norm(model: Any) -> nn.Module | None:
    """The norm between the last layer and the head, by the name all supported families give it."""
    base = getattr(model, "model", None)
    norm = getattr(getattr(base, "language_model", base), "norm", None)
    return norm if isinstance(norm, nn.Module) else None


def read_corpus(
    config: Config, renderer: Renderer, mask_token: int, target_config: Any, hold_out: bool | None = None
) -> Corpus:
    """The data as this config asks for it; `hold_out` is what an interrupted run had decided.

    Documents are cut at the row's length, or where the target's positions end if that comes first.
    """
    positions = getattr(target_config, "max_position_embeddings", None) or config.data.row_tokens
    return build_corpus(
        config.data.train,
        renderer,
        mask_token=mask_token,
        row_tokens=min(config.data.row_tokens, positions),
        hold_out_prompts=config.eval.prompts is None if hold_out is None else hold_out,
        form=config.data.form,
    )


def make_renderer(config: Config, tokenizer: Any) -> Renderer:
    """The template as this config sets it."""
    data = config.data
    return Renderer(tokenizer, TemplateSettings(data.thinking, data.template_arguments, data.template_date))


def eval_prompts(config: Config, corpus: Corpus) -> list[Prompt]:
    """The prompts that evaluation may use."""
    return read_prompts(config.eval.prompts) if config.eval.prompts is not None else list(corpus.held_out)


def choose_evaluation(config: Config, prompts: int) -> Decision:
    """What τ is watched on."""
    if not config.eval.every:
        return Decision("evaluation", "none", "eval.every is 0")
    if not prompts:
        return Decision("evaluation", "none", "too few chats to hold any out; set eval.prompts to watch τ")
    reason = "held out" if config.eval.prompts is None else "eval.prompts"
    return Decision("evaluation", f"{min(prompts, config.eval.limit)} prompts", f"{reason}; at most eval.limit")


def packing_settings(config: Config) -> PackingSettings:
    """Budgets of a row.

    Raises:
        ConfigError: a single document could have more anchors than `data.row_anchors`.
    """
    data = config.data
    needed = anchor_count(data.row_tokens, data.anchor_density)
    if data.row_anchors is not None and data.row_anchors < needed:
        raise ConfigError(
            f"data.row_anchors is {data.row_anchors}, but one document of data.row_tokens {data.row_tokens} may have "
            f"{needed} anchors at data.anchor_density {data.anchor_density}; raise it to {needed} or more"
        )
    return PackingSettings(
        row_tokens=data.row_tokens,
        row_anchors=data.row_anchors or needed,
        anchor_density=data.anchor_density,
        packing=data.packing,
        seed=config.seed,
    )


def choose_steps(config: Config, source: RowSource | None) -> Decision:
    """As many as the config says, or as its epochs take; None without rows to count."""
    if config.train.steps is not None:
        return Decision("steps", config.train.steps, "set in the config")
    if source is None:
        return Decision("steps", None, f"{config.train.epochs} epochs of rows that are not counted")
    rows = sum(source.epoch_rows(epoch) for epoch in range(config.train.epochs))
    steps = -(-rows // config.train.rows_per_step)
    return Decision("steps", steps, f"{config.train.epochs} epochs of {source.epoch_rows(0)} rows")


def check_capacity(config: Config, feature_bytes_per_token: int) -> None:
    """The channel must hold the rows of one target call, whose space is reserved before any of them is made.

    Raises:
        InputError: it does not; says what would.
    """
    need = channel_need(config, feature_bytes_per_token)
    if need > config.pipeline.channel_mib * 2**20:
        raise InputError(
            f"pipeline.channel_mib {config.pipeline.channel_mib} holds less than the features of one target "
            f"call ({-(-need // 2**20)} MiB); raise it, or lower data.row_tokens or pipeline.target_batch_rows"
        )


def channel_need(config: Config, feature_bytes_per_token: int) -> int:
    """Bytes of the features of one target call."""
    return config.data.row_tokens * config.pipeline.target_batch_rows * feature_bytes_per_token
