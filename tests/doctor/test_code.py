"""What sources say they call, and what code does call."""

from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.doctor.code import compiling_calls, observe, reentrant_calls, sources


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch.nn.attention.flex_attention import flex_attention as f\nf(q, k, v)", "flex_attention"),
        ("import torch.nn.attention.flex_attention as fa\nfa.flex_attention(q, k, v)", "flex_attention"),
        ("import torch as t\ncompiled = t.compile(f)", "torch.compile"),
        ("from torch import compile\ncompiled = compile(f)", "torch.compile"),
        ("import torch\n@torch.compile\ndef f(x): ...", "torch.compile"),
        ("import torch\n@torch.compile(dynamic=True)\ndef f(x): ...", "torch.compile"),
        ("from torch.fx import symbolic_trace\nsymbolic_trace(m)", "symbolic_trace"),
        ("import torch\nx = torch.compiler.is_compiling()", None),
        ("import re\nre.compile('flex_attention')", None),
        ("pattern = compile('x', 'f', 'exec')", None),
        ("def forward(self):\n    '''Not flex_attention(q, k, v).'''", None),
    ],
)
def test_calls_that_compile_are_found_by_what_they_are(source: str, name: str | None) -> None:
    found = compiling_calls({Path("model.py"): source})
    if name is None:
        assert found == []
    else:
        [line] = found
        assert line.startswith("model.py:2 ")
        assert line.endswith(name)


@pytest.mark.parametrize(
    ("arguments", "reentrant"),
    [("f, x", True), ("f, x, use_reentrant=True", True), ("f, x, use_reentrant=False", False), ("f, x, **kw", True)],
)
@pytest.mark.parametrize("call", ["torch.utils.checkpoint.checkpoint", "cp"])
def test_reentrant_checkpointing_is_found(call: str, arguments: str, reentrant: bool) -> None:
    source = f"import torch\nfrom torch.utils.checkpoint import checkpoint as cp\n{call}({arguments})"
    assert len(reentrant_calls({Path("model.py"): source})) == int(reentrant)


def test_what_runs_is_observed() -> None:
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(x)
    assert observe(lambda: x + 1) == {}
    assert observe(lambda: compiled(x)) == {"compiled code": 1}
    assert observe(lambda: torch.compile(lambda x: x)) == {"torch.compile": 1}
    assert observe(lambda: torch.fx.Tracer().trace(lambda x: x + 1)) == {"a symbolic trace": 1}
    assert observe(lambda: checkpoint(torch.sin, x, use_reentrant=True)) == {"re-entrant checkpointing": 1}
    assert observe(lambda: checkpoint(torch.sin, x, use_reentrant=False))["re-entrant checkpointing"] == 0


def test_sources_are_the_models_own() -> None:
    from conftest import tiny_qwen3

    names = [path.name for path in sources(tiny_qwen3())]
    assert "modeling_qwen3.py" in names
    assert "modeling_utils.py" not in names  # what all models share: its calls would accuse every target
    assert not any("torch/" in str(path) for path in sources(tiny_qwen3()))
