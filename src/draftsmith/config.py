"""The configuration of a run: typed, frozen, read in this file and nowhere else.

The text of a field is its documentation. Files may leave out any key that has a default.
"""

import contextlib
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftsmith.errors import ConfigError

PositiveInt = Annotated[int, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the config. Unknown keys are errors; nothing changes after reading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RunSection(Section):
    dir: str = Field(description="everything the run writes goes here")


class Devices(Section):
    target: list[str] = Field(description="devices that run the target, e.g. [cuda:0, cuda:1]")
    drafter: list[str] = Field(description="devices that train the drafter, e.g. [cuda:2]")


class TargetSection(Section):
    model: str = Field(description="folder or hub id of a Hugging Face causal LM; `demo` is the embedded one")
    revision: str | None = Field(None, description="hub revision (commit, tag or branch)")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")


class DataSection(Section):
    train: list[str] = Field(min_length=1, description="JSONL files (.gz too); `demo` are the embedded conversations")
    row_tokens: Annotated[int, Field(ge=16)] = Field(
        2048, description="token budget of a row; longer documents are cut"
    )
    anchor_density: Annotated[float, Field(gt=0, le=1)] = Field(
        0.25, description="share of a document's eligible positions that become anchors each epoch"
    )
    row_anchors: PositiveInt | None = Field(None, description="anchor budget of a row; default density * row_tokens")
    packing: bool = Field(True, description="several documents per row; false: one")


class DrafterSection(Section):
    init: str = Field("target", description="`target`, `random`, or a drafter folder to start from")
    layers: PositiveInt = Field(2, description="draft layers")
    block_size: Annotated[int, Field(ge=2)] = Field(16, description="B: the anchor and B-1 drafted tokens")
    taps: list[int] | None = Field(None, description="target layers whose outputs are the features; default: by rule")
    mask_token: int | None = Field(None, description="id that fills the slots to draft; default: by rule")
    intermediate_size: PositiveInt | None = Field(None, description="MLP width; default: the target's")
    sliding_window: PositiveInt | None = Field(None, description="window of the sliding layers")
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = Field(
        None, description="kind of each layer; default: all full"
    )


class TrainSection(Section):
    steps: PositiveInt | None = Field(None, description="optimizer steps; default: as many as `epochs` takes")
    epochs: PositiveInt = Field(6, description="passes over the data, if `steps` is not given")
    rows_per_step: PositiveInt = Field(8, description="rows of one optimizer step, over all replicas")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: matrices by Muon, the rest by AdamW")
    lr: Annotated[float, Field(gt=0)] = Field(6e-4, description="peak learning rate of AdamW")
    matrix_lr: Annotated[float, Field(gt=0)] = Field(5e-3, description="peak learning rate of Muon's matrices")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="of matrices, decoupled")
    warmup: Probability = Field(0.04, description="share of the steps with a rising learning rate")
    schedule: Literal["cosine", "wsd", "constant"] = Field("cosine", description="course of the learning rate")
    clip: Annotated[float, Field(gt=0)] = Field(1.0, description="limit of the gradient norm")
    gamma: Annotated[float, Field(gt=0)] | None = Field(
        None, description="slots weigh exp(-(k-1)/gamma); default: 7, 5, 4 for B = 16, 10, 8"
    )


class PipelineSection(Section):
    channel_mib: PositiveInt = Field(256, description="features waiting for the drafters, at most")
    target_batch_rows: PositiveInt = Field(1, description="rows of one target call; divides rows_per_step")
    threads: PositiveInt | None = Field(None, description="intra-op threads per worker; default: cores / workers")


class CheckpointSection(Section):
    every: Annotated[int, Field(ge=0)] = Field(500, description="steps between checkpoints, 0: only at the end")
    keep: PositiveInt = Field(3, description="how many checkpoints to keep")


class EvalSection(Section):
    every: Annotated[int, Field(ge=0)] = Field(500, description="steps between evaluations, 0: never")
    prompts: list[str] | None = Field(
        None, description="prompt files; default: hold out the min(64, 5 %) chats with the smallest content hash"
    )
    limit: PositiveInt = Field(64, description="use at most this many prompts")
    max_new_tokens: Annotated[int, Field(ge=2)] = Field(256, description="per prompt")


class ReportSection(Section):
    tensorboard: bool = Field(False, description="also write TensorBoard files (needs draftsmith[tensorboard])")


class Config(Section):
    """A whole run."""

    run: RunSection
    seed: int = Field(0, ge=0, description="anchors, order of documents, random weights")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="kind of device to use")
    topology: str | Devices = Field("auto", description="T+D, `auto`, or lists {target: [...], drafter: [...]}")
    target: TargetSection
    data: DataSection
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
        drafter = self.drafter
        if drafter.layer_types is not None and len(drafter.layer_types) != drafter.layers:
            raise ConfigError(
                f"drafter.layer_types has {len(drafter.layer_types)} entries for drafter.layers {drafter.layers}"
            )
        if "sliding_attention" in (drafter.layer_types or []) and drafter.sliding_window is None:
            raise ConfigError("drafter.layer_types has a sliding layer: set drafter.sliding_window")


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies `--set a.b=c` overrides.

    Raises:
        ConfigError: one line with the file, the line, the dotted path and the remedy.
    """
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
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys like `run:` and `target:`, found {type(data).__name__}")
    for override in overrides:
        _apply(data, override)
    return parse_config(data, str(path), tree)


def parse_config(data: Mapping[str, Any], source: str, tree: yaml.Node | None = None) -> Config:
    """Checks plain data against the schema; `source` and `tree` are for the message."""
    try:
        return Config.model_validate(_floats(Config, data))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0], source, tree)) from None


def dump_config(config: Config, notes: Sequence[str]) -> str:
    """YAML that `load_config` reads back to the same config, headed by notes as comments."""
    head = "".join(f"# {note}\n" for note in notes)
    return head + yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)


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
        raise ConfigError(f"--set {override}: write it as --set section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: the value is not YAML") from None
    *sections, key = path.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {override}: {section} is not a section")
    data[key] = value


def _floats(model: type[BaseModel], data: Any) -> Any:
    """Accepts what YAML makes of numbers people write: 1 and 1e-3 (a string in YAML 1.1) where a float is meant."""
    if not isinstance(data, Mapping):
        return data
    out = dict(data)
    for name, info in model.model_fields.items():
        if name not in out:
            continue
        annotation = str(info.annotation)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            out[name] = _floats(info.annotation, out[name])
        elif "float" in annotation and isinstance(out[name], (str, int)) and not isinstance(out[name], bool):
            with contextlib.suppress(ValueError):  # not a number: the schema says so, with the path
                out[name] = float(out[name])
    return out


def _explain(error: Any, source: str, tree: yaml.Node | None) -> str:
    path = [str(part) for part in error["loc"]]
    dotted = ".".join(path)
    place = f"{source}:{line}" if (line := _line(tree, path)) else source
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _keys_at(path[:-1]), 1, 0.5)
        every = difflib.get_close_matches(path[-1], sorted(_all_keys(Config)), 1, 0.6)
        nearest = near or every
        hint = f"did you mean {'.'.join([*path[:-1], near[0]]) if near else every[0]}?" if nearest else "remove it"
        return f"{place}: unknown key {dotted}; {hint}"
    if error["type"] == "missing":
        return f"{source}: {dotted} is missing; add it"
    return f"{place}: {dotted} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _section_at(path: Sequence[str]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Config
    for part in path:
        info = model.model_fields.get(part) if model else None
        annotation = info.annotation if info else None
        model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return model


def _keys_at(path: Sequence[str]) -> list[str]:
    model = _section_at(path)
    return list(model.model_fields) if model else []


def _all_keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, info in model.model_fields.items():
        keys.add(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys |= _all_keys(info.annotation, f"{prefix}{name}.")
    return keys


def _line(node: yaml.Node | None, path: Sequence[str]) -> int | None:
    """Line of the key at `path` in the file, if it stands there."""
    line = None
    for part in path:
        if not isinstance(node, yaml.MappingNode):
            break
        pair = next((p for p in node.value if p[0].value == part), None)
        if pair is None:
            break
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line
