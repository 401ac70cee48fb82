"""What is wrong with a config, as one line: where it stands, the dotted path, and the nearest key that there is."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import yaml
from pydantic import BaseModel

MOST_SHOWN = 80  # characters of a value that is wrong


@dataclass(frozen=True, slots=True)
class Given:
    """Where a config came from: the file's name, its syntax tree for line numbers, `--set` overrides."""

    source: str
    tree: yaml.Node | None = None
    overrides: Sequence[str] = ()

    def place(self, path: Sequence[str]) -> str:
        """Where the value at `path` was given: the last `--set` that touches it, or the file's line."""
        for override in reversed(self.overrides):
            key = override.partition("=")[0].split(".")
            if key == list(path[: len(key)]) or (list(path) == key[: len(path)] and _line(self.tree, path) is None):
                return f"--set {shortened(override)}"
        line = _line(self.tree, path)
        return f"{self.source}:{line}" if line else self.source


def explain(errors: Sequence[Any], schema: type[BaseModel], given: Given) -> str:
    """One line for what pydantic found."""
    error = _meant(errors)
    if error["type"] == "value_error":  # a contradiction, which names its key first
        message = str(error["ctx"]["error"])
        return f"{given.place(message.split()[0].split('.'))}: {message}"
    path = [str(part) for part in error["loc"]]
    dotted = ".".join(shortened(part) for part in path)
    if error["type"] == "missing":
        return f"{given.source}: {dotted} is missing; add it"
    place = given.place(path)
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown key {dotted}; {_hint(path, schema)}"
    if error["type"] == "invalid_key":
        key = shown(error["input"])
        return f"{given.source}: unknown key {key}; keys are words, put quotes around a key like on or yes"
    value = shown(error["input"])
    if error["type"] == "model_type":
        first = _keys_at(path, schema)[0]
        return f"{place}: {dotted} is {value}: expected keys below it, like {dotted}.{first}"
    return f"{place}: {dotted} is {value}: {error['msg'][0].lower()}{error['msg'][1:]}"


def shown(value: Any) -> str:
    """A value as the user may have written it, shortened."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python does not print numbers of more than 4,300 digits; YAML reads them, in other bases
        return "a value with thousands of digits"


def shortened(text: str) -> str:
    """On one line, and no longer than a line can be."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}…"


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation is, or has as one branch of a union."""
    candidates = (annotation, *get_args(annotation))
    return next((a for a in candidates if isinstance(a, type) and issubclass(a, BaseModel)), None)


def _meant(errors: Sequence[Any]) -> Any:
    """The error to show: an unknown key first, as a misspelt one is also missing. A union has errors for each branch,
    with the branch in `loc`: those of the branch that fits the input count."""
    fitting = [e for e in errors if e["loc"][:2] != ("topology", "str") or not isinstance(e["input"], Mapping)]
    first = next((e for e in fitting if e["type"] == "extra_forbidden"), fitting[0])
    return {**first, "loc": ("topology", *first["loc"][2:])} if first["loc"][:1] == ("topology",) else first


def _hint(path: Sequence[str], schema: type[BaseModel]) -> str:
    """What to do about an unknown key: the same name in another section, else the nearest one here or anywhere."""
    every = sorted(_all_keys(schema))
    same = [key for key in every if key.split(".")[-1] == path[-1]]
    near = [
        ".".join([*path[:-1], key]) for key in difflib.get_close_matches(path[-1], _keys_at(path[:-1], schema), 1, 0.5)
    ]
    found = same or near or difflib.get_close_matches(path[-1], every, 1, 0.6)
    return f"did you mean {' or '.join(found)}?" if found else "remove it"


def _keys_at(path: Sequence[str], schema: type[BaseModel]) -> list[str]:
    model: type[BaseModel] | None = schema
    for part in path:
        info = model.model_fields.get(part) if model else None
        model = section_in(info.annotation) if info else None
    return list(model.model_fields) if model else []


def _all_keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, info in model.model_fields.items():
        keys.add(prefix + name)
        if section := section_in(info.annotation):
            keys |= _all_keys(section, f"{prefix}{name}.")
    return keys


def _line(node: yaml.Node | None, path: Sequence[str]) -> int | None:
    """Line of the key or list item at `path` in the file; None if that does not stand there."""
    line = None
    for part in path:
        if isinstance(node, yaml.MappingNode):
            pair = next((p for p in node.value if p[0].value == part), None)
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            pair = (node.value[int(part)],) * 2
        else:
            pair = None
        if pair is None:
            return None
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line
