"""From a config to a job: everything is read, checked and decided here, before a single thread exists."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.config import Config, Devices
from draftsmith.data.conversations import read_prompts
from draftsmith.data.corpus import Corpus, build_corpus
from draftsmith.data.packing import PackingSettings, RowSource
from draftsmith.data.template import Renderer, choose_mask_token
from draftsmith.decisions import Decision
from draftsmith.drafter.anchors import anchor_count
from draftsmith.drafter.checkpoint import read_tensors
from draftsmith.drafter.config import FULL, DrafterConfig
from draftsmith.drafter.init import init_from_checkpoint, init_from_target, random_init
from draftsmith.drafter.loss import default_gamma
from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError, InputError
from draftsmith.pipeline.topology import Topology, choose_device, choose_threads, choose_topology, device_of
from draftsmith.target.capture import check_taps, decoder_layers, default_taps
from draftsmith.target.load import Target, TargetSpec, load_target


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """A run, ready to start. `drafter` holds the initial weights on the host, in fp32."""

    config: Config
    topology: Topology
    threads: int
    target: Target
    drafter: Drafter
    corpus: Corpus
    source: RowSource
    prompts: tuple[tuple[int, ...], ...]
    steps: int
    gamma: float
    decisions: tuple[Decision, ...]

    @property
    def feature_bytes_per_token(self) -> int:
        return self.drafter.config.feature_size * self.target.embedding_VH.element_size()


def prepare(config: Config, resolved: "Resolved | None" = None) -> Job:
    """Loads the target and the data and makes every choice, each with its reason.

    Args:
        config: checked.
        resolved: what an interrupted run had decided; rules where the config leaves the choice open.

    Raises:
        InputError, ConfigError: one line with the remedy.
    """
    decisions: list[Decision] = []

    def decide(decision: Decision) -> Any:
        decisions.append(decision)
        return decision.value

    device = decide(choose_device(config.device))
    wanted: str | Mapping[str, list[str]] = (
        config.topology.model_dump() if isinstance(config.topology, Devices) else config.topology
    )
    if resolved is not None and wanted == "auto":
        wanted = resolved.topology
    topology: Topology = decide(choose_topology(wanted, device, torch.cuda.device_count()))
    known_threads = config.pipeline.threads or (resolved.threads if resolved is not None else None)
    threads: int = decide(choose_threads(known_threads, topology))
    torch.set_num_threads(threads)

    spec = TargetSpec(config.target.model, config.target.revision, config.target.trust_remote_code)
    target_config = spec.config()
    layers = target_config.num_hidden_layers
    taps = decide(choose_taps(config.drafter.taps, layers))
    target = load_target(spec, taps, device_of(topology.target[0]))
    renderer = Renderer(target.tokenizer)
    decide(renderer.decision)
    mask_token = decide(choose_mask_token(target.tokenizer, target.embedding_VH.shape[0], config.drafter.mask_token))
    shape = choose_shape(config, target_config, taps, mask_token, target.embedding_VH.shape[0])
    drafter = Drafter(shape)
    decide(start_drafter(drafter, config, target))
    gamma = config.train.gamma or default_gamma(shape.block_size)
    decide(Decision("gamma", round(gamma, 3), "set in the config" if config.train.gamma else "the paper's, by B"))

    corpus = build_corpus(
        config.data.train,
        renderer,
        mask_token=mask_token,
        row_tokens=config.data.row_tokens,
        hold_out_prompts=resolved.held_out if resolved is not None else config.eval.prompts is None,
    )
    prompts = read_prompts(config.eval.prompts) if config.eval.prompts is not None else list(corpus.held_out)
    if config.eval.every and not prompts:
        decide(Decision("evaluation", "none", "too few chats to hold any out; set eval.prompts to watch τ"))
    source = RowSource(corpus.documents, _packing(config))
    return Job(
        config=config,
        topology=topology,
        threads=threads,
        target=target,
        drafter=drafter,
        corpus=corpus,
        source=source,
        prompts=tuple(tuple(renderer.prompt_ids(prompt)) for prompt in prompts[: config.eval.limit]),
        steps=decide(_choose_steps(config, source)),
        gamma=gamma,
        decisions=tuple(decisions),
    )


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a run that is to be resumed had decided: worker names, threads, and whether it holds out prompts of its own
    (those must stay out of the training rows even if it is now evaluated on others)."""

    topology: Mapping[str, list[str]]
    threads: int
    held_out: bool


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
        raise ConfigError("drafter.intermediate_size: the target does not say one (mixture of experts?); set it")
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


def _rope(target_config: Any) -> dict[str, Any]:
    """The target's rotary parameters if a Qwen3 drafter can have them, else plain ones with its base.

    Targets that rotate a part of each head, or differently per layer kind, have no counterpart in the checkpoint.
    """
    rope = dict(getattr(target_config, "rope_parameters", None) or {})
    if not rope or "rope_theta" not in rope or rope.get("partial_rotary_factor", 1.0) != 1.0:
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
    folder = Path(init)
    if not folder.is_dir():
        raise ConfigError(f"drafter.init is {init!r}: give target, random, or an existing drafter folder")
    published = DrafterConfig.read(folder)
    for key in ("target_layer_ids", "mask_token_id", "block_size"):
        ours, theirs = getattr(drafter.config, key), getattr(published, key)
        if ours != theirs:
            raise ConfigError(
                f"drafter.init {init}: its {key} is {theirs}, this run's is {ours}; set the drafter section to match"
            )
    return init_from_checkpoint(drafter, read_tensors(folder), init)


def _final_norm(model: Any) -> nn.Module | None:
    """The norm between the last layer and the head, by the name all supported families give it."""
    base = getattr(model, "model", None)
    norm = getattr(getattr(base, "language_model", base), "norm", None)
    return norm if isinstance(norm, nn.Module) else None


def _packing(config: Config) -> PackingSettings:
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


def _choose_steps(config: Config, source: RowSource) -> Decision:
    if config.train.steps is not None:
        return Decision("steps", config.train.steps, "set in the config")
    rows = sum(source.epoch_rows(epoch) for epoch in range(config.train.epochs))
    steps = -(-rows // config.train.rows_per_step)
    return Decision("steps", steps, f"{config.train.epochs} epochs of {source.epoch_rows(0)} rows")


def check_capacity(job: Job) -> None:
    """The channel must hold the largest row.

    Raises:
        InputError: it does not; says what would.
    """
    need = job.config.data.row_tokens * job.feature_bytes_per_token
    capacity = job.config.pipeline.channel_mib * 2**20
    if need > capacity:
        raise InputError(
            f"pipeline.channel_mib {job.config.pipeline.channel_mib} holds less than one row of features "
            f"({need / 2**20:.0f} MiB); raise it or lower data.row_tokens"
        )
