"""The configuration of a run: typed, frozen, read in this file and nowhere else.

The text of a field is its documentation. Files may leave out any key that has a default.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from draftsmith.config_errors import Given, explain, section_in, shortened, shown
from draftsmith.data.settings import TODAY
from draftsmith.errors import NOT_YAML, ConfigError
from draftsmith.redaction import without_secrets

MOST = 2**31 - 1  # beyond it a number of rows, tokens or steps overflows somewhere
MOST_TOKENS, MOST_SLOTS, MOST_WIDTH = 2**20, 2**16, 2**24  # memory is taken for as many at once
MOST_LAYERS = MOST_THREADS = 1024
MOST_EPOCHS = 10_000  # the rows of each are counted before training
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
Whole = Annotated[int, Field(ge=0, le=MOST)]
Rate = Annotated[float, Field(gt=0, le=1e6)]  # beyond it, a step overflows
Probability = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Files = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Section(BaseModel):
    """A part of the config. Unknown keys are errors; nothing changes after reading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    dir: Name = Field(description="everything the run writes goes here")


class Devices(Section):
    target: list[str] = Field(description="devices that run the target, e.g. [cuda:0, cuda:1]")
    drafter: list[str] = Field(description="devices that train the drafter, e.g. [cuda:2]")


class TargetSection(Section):
    model: Name = Field(description="folder or hub id of a Hugging Face causal LM; `demo` is the embedded one")
    revision: str | None = Field(None, description="hub revision (commit, tag or branch)")
    adapter: str | None = Field(
        None, description="folder or hub id (owner/name@revision) of a LoRA adapter, merged at load"
    )
    trust_remote_code: bool = Field(False, description="run code that comes with the model")


class DataSection(Section):
    train: Files = Field(
        min_length=1, description="files, folders, hub data sets or folders of `data prepare`; `demo`: embedded ones"
    )
    form: str | None = Field(None, description="how records are read, see data.md; default: found out for each file")
    thinking: bool | None = Field(None, description="the chat template's switch for thinking; default: left alone")
    template_arguments: dict[str, Any] = Field({}, description="other variables of the chat template")
    template_date: date = Field(TODAY, description="what templates that print the date print")
    row_tokens: Annotated[int, Field(ge=16, le=MOST_TOKENS)] = Field(
        2048, description="token budget of a row; longer documents are cut"
    )
    anchor_density: Annotated[float, Field(gt=0, le=1)] = Field(
        0.25, description="share of a document's eligible positions that become anchors each epoch"
    )
    row_anchors: PositiveInt | None = Field(None, description="anchor budget of a row; default density * row_tokens")
    packing: bool = Field(True, description="several documents per row; false: one")


class StoreSection(Section):
    dir: str | None = Field(None, description="folder of `features: disk`, may be shared; default: run.dir/features")
    dtype: Literal["target", "bfloat16"] = Field(
        "target", description="of kept features; bfloat16: rounded, half of fp32, not equal to online"
    )


class DrafterSection(Section):
    init: Name = Field("target", description="`target`, `random`, or a drafter (folder or hub id) to start from")
    layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = Field(2, description="draft layers")
    block_size: Annotated[int, Field(ge=2, le=MOST_SLOTS)] = Field(
        16, description="B: the anchor and B-1 drafted tokens"
    )
    taps: list[Whole] | None = Field(None, description="target layers whose outputs are the features; default: by rule")
    mask_token: Whole | None = Field(None, description="id that fills the slots to draft; default: by rule")
    intermediate_size: Annotated[int, Field(gt=0, le=MOST_WIDTH)] | None = Field(
        None, description="MLP width; default: the target's"
    )
    sliding_window: PositiveInt | None = Field(None, description="window of the sliding layers")
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = Field(
        None, description="`full_attention` or `sliding_attention` for each layer; default: all full"
    )
    attention: Literal["auto", "blockwise", "flex"] = Field(
        "auto", description="how training attends; flex: compiled, CUDA only; auto: flex on CUDA, else blockwise"
    )
    checkpointing: Literal["none", "layer"] = Field(
        "none", description="layer: keep only layer inputs for the backward and compute each layer twice"
    )


class TrainSection(Section):
    steps: PositiveInt | None = Field(None, description="optimizer steps; default: as many as `epochs` takes")
    epochs: Annotated[int, Field(gt=0, le=MOST_EPOCHS)] = Field(
        6, description="passes over the data, if `steps` is not given"
    )
    rows_per_step: PositiveInt = Field(8, description="rows of one optimizer step, over all replicas")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="`adamw`, or `muon`: matrices by Muon, the rest by AdamW"
    )
    lr: Rate = Field(6e-4, description="peak learning rate of AdamW")
    matrix_lr: Rate = Field(5e-3, description="peak learning rate of Muon's matrices")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="of matrices, decoupled")
    warmup: Probability = Field(0.04, description="share of the steps with a rising learning rate")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="course of the learning rate: `cosine`, `wsd` or `constant`"
    )
    clip: Annotated[float, Field(gt=0)] = Field(1.0, description="limit of the gradient norm")
    max_bad_rows: Whole = Field(
        64, description="rows that may be left out because features, loss or gradient are not finite"
    )
    gamma: Annotated[float, Field(gt=0)] | None = Field(
        None, description="slots weigh exp(-(k-1)/gamma); default: 7, 5, 4 for B = 16, 10, 8"
    )


class PipelineSection(Section):
    channel_mib: PositiveInt = Field(256, description="features waiting for the drafters, at most")
    target_batch_rows: PositiveInt = Field(1, description="rows of one target call; divides rows_per_step")
    threads: Annotated[int, Field(gt=0, le=MOST_THREADS)] | None = Field(
        None, description="intra-op threads per worker; default: cores / workers"
    )
    stall_s: PositiveInt = Field(1200, description="seconds without progress of a worker that end the run")


class CheckpointSection(Section):
    every: Whole = Field(500, description="steps between checkpoints, 0: only at the end")
    keep: PositiveInt = Field(3, description="how many checkpoints to keep")


class EvalSection(Section):
    every: Whole = Field(500, description="steps between evaluations, 0: never")
    prompts: Files | None = Field(
        None, description="prompt files; default: hold out the min(64, 5 %) chats with the smallest content hash"
    )
    limit: PositiveInt = Field(64, description="use at most this many prompts")
    max_new_tokens: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = Field(256, description="per prompt")


class ReportSection(Section):
    tensorboard: bool = Field(False, description="also write TensorBoard files (needs draftsmith[tensorboard])")


class Config(Section):
    """A whole run."""

    run: RunSection
    seed: int = Field(0, ge=0, lt=2**63, description="anchors, order of documents, random weights")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="kind of device to use: `auto` (CUDA if there is any), `cpu` or `cuda`"
    )
    topology: str | Devices = Field("auto", description="T+D, `auto`, or lists {target: [...], drafter: [...]}")
    target: TargetSection
    data: DataSection
    features: Literal["online", "memory", "disk"] = Field(
        "online",
        description="where later epochs find features: `online` (computed again), `memory`, `disk`; see data.md",
    )
    store: StoreSection = StoreSection()
    drafter: DrafterSection = DrafterSection()
    train: TrainSection = TrainSection()
    pipeline: PipelineSection = PipelineSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    report: ReportSection = ReportSection()

    def model_post_init(self, context: Any) -> None:
        """Contradictions between sections."""
        if self.train.rows_per_step % self.pipeline.target_batch_rows:
            raise ConfigError(
                f"pipeline.target_batch_rows {self.pipeline.target_batch_rows} does not divide train.rows_per_step "
                f"{self.train.rows_per_step}; choose a divisor, so that a resumed run forms the same batches"
            )
        _check_arguments(self.data.template_arguments)
        drafter = self.drafter
        if drafter.layer_types is not None and len(drafter.layer_types) != drafter.layers:
            raise ConfigError(
                f"drafter.layer_types has {len(drafter.layer_types)} entries for drafter.layers {drafter.layers}"
            )
        if "sliding_attention" in (drafter.layer_types or []) and drafter.sliding_window is None:
            raise ConfigError("drafter.layer_types has a sliding layer: set drafter.sliding_window")


class MachineDevices(Section):
    count: PositiveInt = Field(description="how many there are")
    memory_gib: Annotated[float, Field(gt=0)] = Field(description="memory of each")
    name: str = Field("GPU", description="what they are called")


class MachineFile(Section):
    """A machine that `train --plan --machine FILE` plans for."""

    host_memory_gib: Annotated[float, Field(gt=0)] = Field(description="memory of the host")
    cores: PositiveInt = Field(description="CPU cores")
    devices: MachineDevices | None = Field(None, description="CUDA devices, all alike; none: a CPU machine")


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies `--set a.b=c` overrides.

    Raises:
        ConfigError: one line with the file, the line, the dotted path and the remedy.
    """
    data, tree = _read_yaml(path)
    for override in overrides:
        _apply(data, override)
    return parse_config(data, str(path), tree, overrides)


def load_machine(path: Path) -> MachineFile:
    """Reads the description of a machine.

    Raises:
        ConfigError: one line with the file, the dotted path and what is expected.
    """
    data, _ = _read_yaml(path)
    try:
        return MachineFile.model_validate(_plain(MachineFile, data))
    except ValidationError as error:
        first = error.errors()[0]
        dotted = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{path}: {dotted}: {first['msg'].lower()}; a machine has {', '.join(MachineFile.model_fields)}, its "
            f"devices have {', '.join(MachineDevices.model_fields)}"
        ) from None


def _read_yaml(path: Path) -> tuple[dict[str, Any], yaml.Node | None]:
    """A file's keys, and its syntax tree for line numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config {path} is not UTF-8 text") from None
    try:
        data, tree = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not YAML: {error.problem}") from None
    except NOT_YAML as error:
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise ConfigError(f"{path}: expected keys like `run:` and `target:`, found {found}")
    _refuse_duplicates(tree, str(path))
    return data, tree


def parse_config(
    data: Mapping[str, Any], source: str, tree: yaml.Node | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Checks plain data against the schema; `source`, `tree` and `overrides` are for the message."""
    given = Given(source, tree, overrides)
    try:
        config = Config.model_validate(_plain(Config, data))
    except ValidationError as error:
        raise ConfigError(explain(error.errors(), Config, given)) from None
    for path, text in _texts(config.model_dump()):
        _check_text(path, text, given)
    return config


def _check_text(path: tuple[str, ...], text: str, given: Given) -> None:
    """Every text of a config ends up in files: it must be one that a file can hold, and everyone may read."""
    place, dotted = given.place(path), ".".join(path)
    if "\0" in text or text != text.encode("utf-8", "ignore").decode():
        raise ConfigError(f"{place}: {dotted} holds a NUL or half a surrogate pair, which no file can hold; remove it")
    if without_secrets(text) != text:
        raise ConfigError(
            f"{place}: {dotted} holds a secret, which the run would write down; leave it out (for the hub, log in with "
            "`hf auth login` or set HF_TOKEN)"
        )


def _texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """All strings of a config with their paths, keys that a user chose among them."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from ((path, text) for _, text in _texts(key))
            yield from _texts(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, (*path, str(number)))


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """They are saved and compared as JSON."""
    for name, value in arguments.items():
        try:
            same: Any = json.loads(json.dumps(value, allow_nan=False))
        except (ValueError, TypeError, RecursionError):
            same = ...
        if same != value:
            raise ConfigError(
                f"data.template_arguments.{shortened(name)} is {shown(value)}: JSON has no such value; put a "
                "text into quotes"
            )


def dump_config(config: Config, notes: Sequence[str]) -> str:
    """YAML that `load_config` reads back to the same config, headed by notes as comments."""
    head = "".join(f"# {note}\n" for note in notes)
    data = config.model_dump()
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    if yaml.safe_load(text) != data:  # the library writes some line breaks of Unicode so that it reads others
        text = yaml.safe_dump(data, sort_keys=False)
    return head + text


def differing_keys(old: Config, new: Config) -> list[str]:
    """Dotted paths on which two configs differ."""
    a, b = _flat(old.model_dump()), _flat(new.model_dump())
    return sorted(key for key in a.keys() | b.keys() if a.get(key, ...) != b.get(key, ...))


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _apply(data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {shortened(override)}: write it as --set section.key=value")
    override = shortened(override)
    try:
        value = yaml.safe_load(text)
    except NOT_YAML:
        raise ConfigError(f"--set {override}: the value is not YAML") from None
    *sections, key = path.split(".")
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            raise ConfigError(f"--set {override}: {section} is not a section")
    data[key] = value


def _refuse_duplicates(node: yaml.Node | None, source: str, path: tuple[str, ...] = ()) -> None:
    """YAML lets the last of two equal keys win; here the first would be lost in silence."""
    if not isinstance(node, yaml.MappingNode) or len(path) > 3:
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in lines:
            dotted = ".".join([*path, str(key.value)])
            raise ConfigError(f"{source}:{line}: {dotted} stands in line {lines[key.value]} already; keep one of them")
        lines[key.value] = line
        _refuse_duplicates(value, source, (*path, str(key.value)))


def _plain(model: type[BaseModel], data: Any) -> Any:
    """Accepts what YAML makes of what people write: 1 and 1e-3 (a string in YAML 1.1) where a float is meant, and a
    section without keys (None)."""
    if not isinstance(data, Mapping):
        return data
    out = dict(data)
    for name, info in model.model_fields.items():
        if name not in out:
            continue
        section, value = section_in(info.annotation), out[name]
        if section is not None:
            out[name] = _plain(section, {} if value is None and info.annotation is section else value)
        elif "float" in str(info.annotation) and isinstance(value, (str, int)) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):  # no such number: the schema says so, with the path
                out[name] = float(value)
    return out
