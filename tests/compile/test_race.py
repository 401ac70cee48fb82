"""The whole race, naive and guarded, on the installed PyTorch: `pytest -m race`. Minutes; needs a C++ compiler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "compile_race.py"
HARM = ("failures", "eager_runs", "wrong_results", "failed_forwards", "wrong_features", "wrong_graphs")


@pytest.mark.slow
@pytest.mark.race
def test_naive_threads_race_and_guarded_ones_do_not(tmp_path: Path) -> None:
    out = tmp_path / "race.json"
    run = subprocess.run([sys.executable, str(PROGRAM), "--json", str(out)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    figures = json.loads(out.read_text())
    print(torch.__version__, figures)
    assert figures["guarded_calls"] >= 800
    assert figures["guarded_forwards"] >= 100
    assert {name: figures[f"guarded_{name}"] for name in HARM} == dict.fromkeys(HARM, 0)
    assert figures["damaged_after_guarded"] == []
    assert figures["guarded_max_concurrent"] >= 2
    assert figures["forwards_between_compiles"] > 0
    assert figures["overhead_us"] < 10
    assert figures["naive_failures"] > 0
    assert figures["naive_eager_runs"] > 0
    assert figures["naive_failed_forwards"] + figures["naive_wrong_features"] > 0
