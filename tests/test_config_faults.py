"""Every field of the schema, whatever it is, refuses what it cannot take: in one line, by its dotted path, with code 2.

The schema itself is walked, so a new field is covered as soon as it is there.
"""

import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator

from draftsmith import cli
from draftsmith.config import Config
from draftsmith.redaction import HIDDEN

BASE: dict[str, Any] = {"run": {"dir": "r"}, "target": {"model": "demo"}, "data": {"train": ["demo"]}}
SAMPLES = {bool: True, int: 7, float: 1.5, str: "no such word", list: [["x"]], dict: {"zz": 1}, date: date(2026, 2, 3)}
TAKEN_TOO = {float: {int}, date: set(), int: set()}  # types that are no mistake where another is meant


@dataclass(frozen=True)
class Leaf:
    """A field: its path, the types of its values (`items`: of the values of a list), and the limits they have."""

    path: tuple[str, ...]
    types: frozenset[type]
    items: frozenset[type]
    limits: tuple[Any, ...]
    choices: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join(self.path)


def _parts(annotation: Any) -> Iterator[Any]:
    """Types, limits and `Literal`s of an annotation, unions and `Annotated` taken apart."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        for branch in get_args(annotation):
            yield from _parts(branch)
    elif get_origin(annotation) is typing.Annotated:
        yield from _parts(annotation.__origin__)
        for more in annotation.__metadata__:
            yield from getattr(more, "metadata", [more])
    else:
        yield annotation


def _leaf(path: tuple[str, ...], info: Any) -> Leaf:
    parts = [*_parts(info.annotation), *info.metadata]
    plain = {get_origin(part) or part for part in parts if isinstance(get_origin(part) or part, type)}
    inner = [p for part in parts if get_origin(part) is list for p in _parts(get_args(part)[0])]
    literals = [part for part in [*parts, *inner] if get_origin(part) is Literal]
    found = {dict if issubclass(t, BaseModel) else t for t in plain}
    if any(isinstance(part, BeforeValidator) for part in parts):  # one file instead of a list
        found.add(str)
    limits = tuple(p for p in [*parts, *inner] if isinstance(p, Ge | Gt | Le | Lt | MinLen))
    words = tuple(word for literal in literals for word in get_args(literal))
    items = frozenset(p for p in inner if isinstance(p, type)) | ({str} if words and inner else set())
    return Leaf(path, frozenset(found), items, limits, words)


def leaves(model: type[BaseModel] = Config, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Every field that is no section."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from leaves(info.annotation, (*path, name))
            continue
        yield _leaf((*path, name), info)
        for branch in get_args(info.annotation):
            if isinstance(branch, type) and issubclass(branch, BaseModel):
                yield from leaves(branch, (*path, name))


LEAVES = {str(leaf): leaf for leaf in leaves()}
every_field = pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Reads a config as a person does and returns the one line that it is answered with."""
    monkeypatch.chdir(tmp_path)

    def run(path: tuple[str, ...], value: Any, *overrides: str) -> str:
        data: dict[str, Any] = {key: dict(section) for key, section in BASE.items()}
        place = data
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
        if path[0] == "topology" and len(path) == 2:
            place.update({key: ["cpu:0"] for key in ("target", "drafter") if key not in place})
        text = yaml.safe_dump(data, allow_unicode=False)
        (tmp_path / "c.yaml").write_text(text)
        code = cli.main(["train", "c.yaml", "--plan", *(f"--set={text}" for text in overrides)])
        out = capsys.readouterr()
        assert code == 2, (code, value, out.err)
        assert out.out == ""
        assert re.fullmatch(r"draftsmith: [^\n]+\n", out.err), out.err
        assert "Traceback" not in out.err
        return out.err

    return run


def test_the_walk_finds_every_field() -> None:
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    assert set(re.findall(r"^\| `([a-z_.]+)` \|", text, re.M)) <= set(LEAVES)
    assert {"seed", "topology", "topology.target", "data.template_arguments", "drafter.taps"} <= set(LEAVES)


@every_field
def test_a_wrong_type(leaf: Leaf, refuse: Any) -> None:
    takes = set(leaf.types)
    for kind in leaf.types:
        takes |= TAKEN_TOO.get(kind, set())
    wrong = [value for kind, value in SAMPLES.items() if kind not in takes]
    if types.NoneType not in takes:
        wrong.append(None)
    assert len(wrong) >= 4
    for value in wrong:
        line = refuse(leaf.path, value)
        assert re.search(r"c\.yaml:\d+: ", line), line
        assert re.search(rf"\b{re.escape(str(leaf))}\b", line), (value, line)


@every_field
def test_a_wrong_type_inside_a_list(leaf: Leaf, refuse: Any) -> None:
    for value in [v for kind, v in SAMPLES.items() if kind not in leaf.items] if leaf.items else []:
        assert f"{leaf}.0 is" in refuse(leaf.path, [value])


@every_field
def test_a_value_out_of_range(leaf: Leaf, refuse: Any) -> None:
    """Beyond each limit by a little and by a lot, no number, or a word that is not among the choices."""
    wrong: list[Any] = []
    for limit in leaf.limits:
        if isinstance(limit, MinLen):
            wrong.append("" if str in leaf.types and list not in leaf.types else [])
            continue
        edge = next(iter(vars_of(limit).values()))
        beyond = {Ge: edge - 1, Gt: edge, Le: edge + 1, Lt: edge}[type(limit)]
        wrong += [beyond]
    if int in leaf.types | leaf.items:
        wrong += [10**30, -(10**30)]
    if float in leaf.types:
        wrong += [float("inf"), float("-inf"), float("nan"), -1.0, "1e999", "nan"]
    if leaf.choices:
        wrong += ["no such word", ""]
    if bool in leaf.types:
        wrong += ["maybe", 2]
    assert wrong or (leaf.types | leaf.items) <= {str, dict, list, date, types.NoneType}, "a new kind of field"
    for value in wrong:
        line = refuse(leaf.path, [value] if leaf.items and value != [] else value)
        assert re.search(rf"\b{re.escape(str(leaf))}(\.0)? is ", line), (value, line)


def vars_of(limit: Any) -> dict[str, Any]:
    """The one number of a limit, by its name."""
    return {name: getattr(limit, name) for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)}


@every_field
def test_a_misspelt_key(leaf: Leaf, refuse: Any) -> None:
    """Each section has it wrong in four ways; the answer is the key that was meant."""
    name = leaf.path[-1]
    swapped = name[:-2] + name[-1] + name[-2]
    wrong = {name + name[-1], name[0] + name, name[:-1], swapped, name.replace("_", "-"), name.capitalize()}
    for word in sorted(wrong - {name, ""} - {key.split(".")[-1] for key in LEAVES}):
        line = refuse((*leaf.path[:-1], word), 1)
        assert f"unknown key {'.'.join([*leaf.path[:-1], word])}; did you mean " in line, line
        assert re.search(rf"\b{re.escape(str(leaf))}\b", line.partition("did you mean")[2]), line


@every_field
def test_the_same_by_override(leaf: Leaf, refuse: Any) -> None:
    value = "{zz: 1}" if dict not in leaf.types else "[[x]]"
    both = ["topology={target: [cpu:0], drafter: [cpu:0]}"] if leaf.path[0] == "topology" else []
    line = refuse(("run", "dir"), "r", *both, f"{leaf}={value}")
    assert line.startswith(f"draftsmith: --set {leaf}={value}: "), line


@every_field
def test_a_text_that_no_file_can_hold_or_everyone_could_read(leaf: Leaf, refuse: Any) -> None:
    """A NUL, half a surrogate pair, a token: in every place for free text."""
    if str not in leaf.types | leaf.items or leaf.choices:
        return
    for text, said in {"a\0b": "holds a NUL", "hf_" + "A1b2C3d4" * 4: "holds a secret"}.items():
        if leaf.path[0] == "topology":
            text = text if leaf.items else f"{text}+1"
        line = refuse(leaf.path, [text] if leaf.items else text)
        assert said in line
        assert str(leaf) in line
        assert "A1b2C3d4" not in line


CONTRADICTIONS = {
    "pipeline.target_batch_rows": ["pipeline.target_batch_rows=3"],
    "drafter.layer_types": ["drafter.layer_types=[full_attention]"],
    "drafter.layer_types ": ["drafter.layers=1", "drafter.layer_types=[sliding_attention]"],
    "data.row_anchors": ["data.row_anchors=1"],
    "device": ["device=cuda"],
    "topology": ["topology=0+1"],
    "topology ": ["topology=" + "9" * 5000 + "+1"],
    "topology.target": ["topology={target: [cuda:0], drafter: [cpu:0]}"],
    "topology.drafter": ["topology={target: [cpu:0], drafter: [cpu:0, cpu:0]}"],
    "drafter.attention": ["drafter.attention=flex"],
    "drafter.taps": ["drafter.taps=[7, 1]"],
    "drafter.taps ": ["drafter.taps=[1, 400]"],
    "drafter.mask_token": ["drafter.mask_token=99999999"],
    "data.template_arguments.x": ["data.template_arguments={x: 2026-01-01}"],
    "data.template_arguments.y": ["data.template_arguments={y: .nan}"],
    "drafter.init": ["drafter.init=no-such-folder"],
    "data.form": ["data.form=nonsense"],
}


@pytest.mark.parametrize("where", CONTRADICTIONS)
def test_contradictions(where: str, refuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between keys, and between a key and the machine, target or data."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert where.strip() in refuse(("train", "steps"), 1, *CONTRADICTIONS[where])


@pytest.mark.parametrize(
    "override",
    [
        "data.template_date=2024-13-45",
        "seed=" + "9" * 5000,
        "data.template_arguments=" + "[" * 3000,
        "a=\0",
        "seed=&a [*a]",
    ],
)
def test_an_override_that_is_no_yaml(override: str, refuse: Any) -> None:
    assert "--set" in refuse(("run", "dir"), "r", override)


def test_a_long_value_is_cut_and_a_secret_hidden(refuse: Any) -> None:
    assert len(refuse(("train", "steps"), "x" * 100_000)) < 300
    assert HIDDEN in refuse(("train", "steps"), "https://me:password@host/")
