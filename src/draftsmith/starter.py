"""`draftsmith init`: a commented config for a target and data, with every key in sight and only the needed ones set."""

import itertools
import re
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from draftsmith.config import Config, DataSection, load_config
from draftsmith.data.conversations import Conversation, Reject, read_conversations
from draftsmith.data.hub import is_prepared
from draftsmith.errors import ConfigError, InputError
from draftsmith.target.capture import default_taps
from draftsmith.target.load import TargetSpec

LOOK_AT = 100  # records of a data file that are read to see whether it holds conversations
DEEP_TARGET = 12  # layers from which the paper's five draft layers are worth their time

_HEAD = """\
# Written by `draftsmith init`. Keys behind a # stand at their defaults.
#   draftsmith train {name} --plan   shows what will be decided and how much memory it takes
#   draftsmith train {name}          trains
"""


def write_config(target: str, files: Sequence[str], out: Path) -> str:
    """Writes `out` and returns what to do next.

    Raises:
        ConfigError: `out` is there already.
        InputError: the target's config or a data file cannot be used.
    """
    if out.exists():
        raise ConfigError(f"--out {out} exists; choose another name or remove it")
    target_config = TargetSpec(target).config()
    for name in files:
        check_data(name)
    text = _HEAD.format(name=out) + "\n".join(_lines(Config, chosen_keys(target, files, target_config))) + "\n"
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from None
    load_config(out)
    return f"wrote {out}; next: draftsmith train {out} --plan"


def check_data(name: str) -> None:
    """A data file must hold a conversation among its first lines.

    Raises:
        InputError: it cannot be read or holds none; says why.
    """
    if is_prepared(name):
        return
    items = list(itertools.islice(read_conversations([name]), LOOK_AT))
    if any(isinstance(item, Conversation) for item in items):
        return
    reason = next((item for item in items if isinstance(item, Reject)), "no records")
    raise InputError(f"--data {name} holds no conversation in its first {LOOK_AT} records; first reason: {reason}")


def chosen_keys(target: str, files: Sequence[str], target_config: Any) -> dict[str, Any]:
    """The keys that are set, by section; the others keep their defaults."""
    layers = target_config.num_hidden_layers
    draft_layers = 5 if layers >= DEEP_TARGET else 2
    longest = int(target_config.max_position_embeddings)
    row_tokens = min(DataSection.model_fields["row_tokens"].default, longest)
    taps = default_taps(layers)
    row_mib = row_tokens * len(taps) * target_config.hidden_size * 4 / 2**20  # in fp32, as on the CPU
    drafter: dict[str, Any] = {"init": "target", "layers": min(draft_layers, layers), "block_size": 16}
    if not isinstance(getattr(target_config, "intermediate_size", None), int):
        drafter["intermediate_size"] = 4 * target_config.hidden_size
    return {
        "run": {"dir": _run_dir(target)},
        "topology": "auto",
        "target": {"model": target},
        "data": {"train": list(files), "row_tokens": row_tokens},
        "drafter": drafter,
        "train": {"epochs": 6, "rows_per_step": 8, "lr": 6e-4},
        "pipeline": {"channel_mib": max(256, 4 * ceil(row_mib))},
        "eval": {"every": 500},
    }


def _run_dir(target: str) -> str:
    name = re.sub(r"[^\w.-]+", "-", Path(target).name).strip("-.") or "mine"
    folders = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return str(next(folder for folder in folders if not folder.exists()))


def _lines(model: type[BaseModel], chosen: Mapping[str, Any], indent: str = "") -> list[str]:
    """Every key of a section with its description; those that are not chosen behind a #."""
    lines = []
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner = _lines(kind, chosen.get(name, {}), indent + "  ")
            lines += ["", f"{indent}{name}:" if name in chosen else f"{indent}# {name}:", *inner]
            continue
        value = _written(chosen.get(name, info.default))
        lines.append(f"{indent}{'' if name in chosen else '# '}{name}: {value}  # {info.description}")
    return lines


def _written(value: Any) -> str:
    """A value as YAML, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return str(text).removesuffix("...\n").strip()
