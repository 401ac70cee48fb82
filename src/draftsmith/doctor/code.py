"""What a model's code says it calls (syntax tree) and what it does call (observed)."""

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch.fx
import torch.utils.checkpoint
from torch import nn
from torch.nn.attention import flex_attention
from transformers import PreTrainedModel

from draftsmith.compile import private

COMPILING = ("flex_attention", "create_block_mask", "torch.compile", "symbolic_trace", "make_fx")
WATCHED: dict[CodeType, str] = {
    flex_attention.flex_attention.__code__: "flex_attention",
    torch.compile.__code__: "torch.compile",
    torch.fx.Tracer.trace.__code__: "a symbolic trace",
    torch.utils.checkpoint.CheckpointFunction.forward.__code__: "re-entrant checkpointing",
}


def observe(run: Callable[[], object]) -> Counter[str]:
    """Calls `run` and counts what of interest it called on this thread, also if it raises (the error goes on)."""
    seen: Counter[str] = Counter()
    observe_into(seen, run)
    return seen


def observe_into(seen: Counter[str], run: Callable[[], object]) -> None:
    """As `observe`, for who wants to know what was called before an error."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        name = WATCHED.get(frame.f_code)
        if name is None and private.is_compile_wrapper(frame.f_code):
            name = "compiled code"
        if name is not None:
            seen[name] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)


def sources(model: nn.Module) -> dict[Path, str]:
    """The files that the model's own classes come from, without PyTorch's and what all models of transformers share."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__} - set(PreTrainedModel.__mro__)
    found: dict[Path, str] = {}
    for cls in classes:
        if cls.__module__.split(".")[0] not in ("torch", "builtins"):
            path = Path(inspect.getsourcefile(cls) or "")
            if path.is_file():
                found[path] = path.read_text(encoding="utf-8")
    return dict(sorted(found.items()))


def compiling_calls(files: dict[Path, str]) -> list[str]:
    """`file:line name` of everything in the sources that compiles, traces or calls flex attention."""
    found = []
    for path, text in files.items():
        tree = ast.parse(text)
        aliases = _imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call | ast.FunctionDef):
                used = [node.func] if isinstance(node, ast.Call) else node.decorator_list
                names = {part.lineno: _dotted(part, aliases) for part in used}
                found += [f"{path.name}:{line} {name}" for line, name in names.items() if _matches(name, COMPILING)]
    return found


def reentrant_calls(files: dict[Path, str]) -> list[str]:
    """`file:line` of every `checkpoint(...)` that is re-entrant: `use_reentrant` is not given as False."""
    found = []
    for path, text in files.items():
        tree = ast.parse(text)
        aliases = _imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _matches(_dotted(node.func, aliases), ("checkpoint.checkpoint",)):
                given = next((k.value for k in node.keywords if k.arg == "use_reentrant"), None)
                if not (isinstance(given, ast.Constant) and given.value is False):
                    found.append(f"{path.name}:{node.lineno} checkpoint")
    return found


def _imported(tree: ast.AST) -> dict[str, str]:
    """Local name -> what it was imported as."""
    return {name: full for node in ast.walk(tree) for name, full in _imports(node)}


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom):
        yield from ((a.asname or a.name, f"{node.module or ''}.{a.name}") for a in node.names)
    elif isinstance(node, ast.Import):
        yield from ((a.asname, a.name) for a in node.names if a.asname)


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """`torch.compile` of the expression that says so; "" for others."""
    parts: list[str] = []
    at: Any = node
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    if not isinstance(at, ast.Name):
        return ""
    return ".".join([aliases.get(at.id, at.id), *reversed(parts)])


def _matches(name: str, wanted: tuple[str, ...]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in wanted)
