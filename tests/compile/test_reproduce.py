"""The program that shows the race shows it, and shows that the guard cures it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.compile import private, reproduce

PAGE = Path(__file__).parents[2] / "docs" / "compile-race.md"


@pytest.mark.slow
def test_naive_threads_fail_and_guarded_ones_do_not() -> None:
    phases = list(reproduce.reproduce_all(1.0))
    assert [(p.guarded, p.tracer) for p in phases] == [(True, False), (True, True), (False, False), (False, True)]
    for phase in phases:
        assert phase.calls > 10
        assert phase.compilations > 0
        assert (phase.traces > 0) == phase.tracer
        if phase.guarded:
            assert (phase.failures, phase.kinds, phase.left_on) == (0, {}, [])
        else:
            assert phase.failures > 0, "the race did not show: this torch has another, or none"


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="guarded: ended with 1"):
        list(reproduce.reproduce_all(0.1))


def test_the_reproduction_of_the_page_prints_what_the_page_says() -> None:
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    compiled, eager = done.stdout.splitlines()
    assert eager == "eager NameError module is not installed as a submodule"
    if private.flag_is_thread_local():
        assert compiled == "compiled ok"
    else:
        assert compiled.startswith("compiled RuntimeError Detected that you are using FX to symbolically trace")
