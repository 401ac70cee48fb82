"""Every suspect is listed with verdict, evidence and remedy; a planted fault turns its check to `fail`, no other."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import nn
from torch.nn.attention import flex_attention

from conftest import tiny_qwen3
from draftsmith import doctor
from draftsmith.cli import main
from draftsmith.compile import guard, hunt, private
from draftsmith.config import Config
from draftsmith.doctor import pytorch, report
from draftsmith.doctor.check import Check, Subject

MakeConfig = Callable[..., Config]
QUICK = [check for check in doctor.CHECKS if check is not pytorch.reproduction]  # that one is tested with its program
CONFIG_CHECKS = {
    "target's code",
    "re-entrant checkpointing",
    "recompile limit",
    "memory of a dense fallback",
    "hunt",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty compiler cache."""
    folder = tmp_path / "compiler-cache"
    folder.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def verdicts(config: Config | None, **options: Any) -> dict[str, str]:
    checks = doctor.run_checks(config, **{"checks": QUICK, **options})
    for check in checks:
        assert check.evidence
        assert check.remedy
    return {check.name: check.verdict for check in checks}


def failed(config: Config | None) -> list[str]:
    return [name for name, verdict in verdicts(config).items() if verdict == "fail"]


def test_a_healthy_install_has_no_fail(demo_config: MakeConfig) -> None:
    found = verdicts(demo_config())
    assert len(found) == len(QUICK) >= 9
    assert set(found.values()) <= {"ok", "warn", "skipped"}
    assert [name for name, verdict in found.items() if verdict == "skipped"] == ["hunt"]
    assert {found["create_block_mask"], found["target's code"], found["state left on"]} == {"ok"}


def test_without_a_config_the_same_checks_are_listed() -> None:
    found = verdicts(None)
    assert {name for name, verdict in found.items() if verdict == "skipped"} == CONFIG_CHECKS
    assert "fail" not in found.values()


def test_the_hunt_trains_and_finds_nobody(demo_config: MakeConfig) -> None:
    [check] = doctor.run_checks(demo_config(), hunt_run=True, checks=[doctor.CHECKS[-1]])
    assert (check.name, check.verdict) == ("hunt", "ok")
    assert "6 steps of training; 0 traces, 0 compilations, 0 meetings" in check.evidence
    assert torch.fx.Tracer.trace is hunt._trace


def test_the_hunt_fails_when_a_target_meets_a_tracer(demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that traces on its own, beside a target that is in its forward."""
    from draftsmith.drafter.model import Drafter

    original = Drafter.forward

    def forward(self: Drafter, *arguments: Any, **more: Any) -> Any:
        deadline = time.monotonic() + 10
        while not hunt.install().meetings and time.monotonic() < deadline:
            torch.fx.Tracer().trace(lambda x: x + 1)
            time.sleep(0.001)
        return original(self, *arguments, **more)

    monkeypatch.setattr(Drafter, "forward", forward)
    config = demo_config(topology="2+1", train__rows_per_step=8)
    try:
        [check] = doctor.run_checks(config, hunt_run=True, checks=[doctor.CHECKS[-1]])
    finally:
        private.restore(private.healthy_state())
    assert check.verdict == "fail"
    side_by_side = [line for line in check.evidence.splitlines() if "thread 'drafter cpu:2': Tracer.trace" in line]
    assert "thread 'target cpu:" in side_by_side[0]


@pytest.fixture(params=["disable", "error_on_nested_fx_trace", "suppress_errors", "stance", "flex", "environment"])
def forced_fallback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    kind = request.param
    if kind == "stance":
        torch.compiler.set_stance("force_eager")
        yield kind
        torch.compiler.set_stance("default")
        return
    if kind == "flex":
        monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield kind
    elif kind == "environment":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield kind
    else:
        with torch._dynamo.config.patch({kind: kind != "error_on_nested_fx_trace"}):
            yield kind


def test_settings_that_force_a_fallback(demo_config: MakeConfig, forced_fallback: str) -> None:
    assert failed(demo_config()) == ["settings that force a fallback"]


@pytest.mark.parametrize("field", ["fx_flag", "compiling_flag", "patch"])
def test_state_left_on(demo_config: MakeConfig, field: str) -> None:
    planted = private.healthy_state()
    values = {name: getattr(planted, name) for name in planted.__slots__}
    if field == "patch":
        values |= {"module_call": fx_patch()}
    else:
        values |= {field: True}
    planted = private.TracingState(**values)
    private.restore(planted)
    try:
        assert failed(demo_config()) == ["state left on"]
        assert private.damage(planted) == [], "the doctor looks, it does not mend"
    finally:
        private.restore(private.healthy_state())
    assert failed(None) == []


def fx_patch() -> Any:
    """What FX puts in place of `nn.Module.__call__`, caught while it is there."""
    caught = []
    torch.fx.Tracer().trace(lambda x: caught.append(nn.Module.__call__))
    return caught[0]


@pytest.mark.parametrize("damage", ["library", "python", "empty"])
def test_a_corrupt_compiler_cache(demo_config: MakeConfig, own_cache: Path, damage: str) -> None:
    library = next(Path(torch.__file__).parent.glob("_C*.so")).read_bytes()
    (own_cache / "ab").mkdir()
    (own_cache / "ab" / "whole.so").write_bytes(library)
    (own_cache / "ab" / "whole.py").write_text("x = 1\n")
    assert failed(demo_config()) == []
    if damage == "library":
        (own_cache / "ab" / "cut.so").write_bytes(library[: len(library) // 2])
    elif damage == "python":
        (own_cache / "ab" / "cut.py").write_text("def call(args):\n    buf0 = empty_strided_cpu((2,")
    else:
        (own_cache / "ab" / "cut.so").write_bytes(b"")
    assert failed(demo_config()) == ["compiler cache"]


FLEX_TARGET = """
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

class FlexConfig(Qwen3Config):
    model_type = "flex_qwen3"

class FlexForCausalLM(Qwen3ForCausalLM):
    config_class = FlexConfig

    def forward(self, input_ids=None, **more):
        q = torch.zeros(1, 1, 128, 16)
        if {condition}:
            flex_attention(q, q, q)
        return super().forward(input_ids=input_ids, **more)
"""


def flex_target(folder: Path, condition: str) -> str:
    """A target with code of its own, on disk."""
    tiny_qwen3().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "flex_qwen3",
        "architectures": ["FlexForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_flex.FlexConfig", "AutoModelForCausalLM": "modeling_flex.FlexForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_flex.py").write_text(FLEX_TARGET.format(condition=condition))
    return str(folder)


@pytest.mark.parametrize(("condition", "verdict"), [("True", "fail"), ("input_ids.shape[1] > 4096", "warn")])
def test_a_target_that_calls_flex_attention_itself(
    demo_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, condition: str, verdict: str
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = flex_target(tmp_path / verdict, condition)
    config = demo_config(target={"model": model, "trust_remote_code": True})
    checks = {check.name: check for check in doctor.run_checks(config, checks=QUICK)}
    assert checks["target's code"].verdict == verdict
    assert "modeling_flex.py:15 torch.nn.attention.flex_attention.flex_attention" in checks["target's code"].evidence
    others = {name for name, check in checks.items() if check.verdict == "fail"} - {"target's code"}
    assert others == set()


def test_signatures_beyond_the_limits(demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for a machine that is not here."""
    from draftsmith.doctor.run import recompile_limit
    from draftsmith.pipeline.machine import Device, Machine

    def on(devices: int) -> Check:
        subject = Subject(demo_config(device="cuda", topology=f"1+{devices - 1}", train__rows_per_step=devices))
        subject.machine = Machine(64, 2**40, (Device("GPU", 2**36),) * devices)
        return recompile_limit(subject)

    assert [on(n).verdict for n in (3, 10)] == ["ok", "warn"]
    assert "9 signatures" in on(10).evidence
    monkeypatch.setattr(guard, "RECOMPILE_LIMIT", 8)
    assert on(10).verdict == "fail"


def test_memory_of_a_dense_fallback(demo_config: MakeConfig) -> None:
    from draftsmith.doctor.run import dense_memory
    from draftsmith.pipeline.machine import Machine

    config = demo_config(data__row_tokens=1024)
    subject = Subject(config)
    check = dense_memory(subject)
    scores = 4 * (256 * 8) * (1024 + 256 * 8) * 4
    assert f"{scores / 2**30:.2f} GiB per copy, {4 * scores / 2**30:.2f} GiB" in check.evidence
    assert check.verdict == "ok"
    small = Subject(config)
    small.machine = Machine(2, 4 * scores - 1, ())
    assert dense_memory(small).verdict == "warn"


def test_a_check_that_breaks_is_a_finding() -> None:
    def breaks(subject: Subject) -> Check:
        """Does it break?"""
        raise KeyError("gone")

    checks = doctor.run_checks(checks=[breaks, pytorch.block_mask])
    assert [check.verdict for check in checks] == ["fail", "ok"]
    assert "KeyError: 'gone'" in checks[0].evidence


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "run_checks", lambda *a, **k: doctor.run_checks(*a, **k, checks=QUICK))
    out = tmp_path / "findings.json"
    assert main(["doctor", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())["checks"]
    assert [set(check) for check in found] == [{"name", "verdict", "evidence", "remedy"}] * len(QUICK)
    for check in found:
        assert check["name"] in printed
    assert "ruled out: create_block_mask" in printed
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert main(["doctor"]) == 1
    assert "TORCHDYNAMO_DISABLE is 1" in capsys.readouterr().out


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--hunt"]) == 2
    assert "--hunt needs a CONFIG" in capsys.readouterr().err
    assert main(["doctor", "--json", str(tmp_path / "no" / "f.json")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_doctor_on_the_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "findings.json"
    example = Path(__file__).parents[2] / "examples" / "demo.yaml"
    assert main(["doctor", str(example), "--hunt", "--json", str(out)]) == 0, capsys.readouterr().out
    found = {check["name"]: check for check in json.loads(out.read_text())["checks"]}
    assert len(found) == len(doctor.CHECKS) >= 9
    assert found["live reproduction"]["verdict"] == "warn"
    assert found["hunt"]["verdict"] == "ok"
    shutil.rmtree(tmp_path)
