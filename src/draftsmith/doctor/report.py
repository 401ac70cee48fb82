"""Findings for people and for scripts."""

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from draftsmith.config import Config
from draftsmith.doctor.check import Check, Verdict
from draftsmith.doctor.checks import run_checks
from draftsmith.redaction import without_secrets

COLOURS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def examine_and_show(config: Config | None, *, hunt: bool, out: Path | None) -> int:
    """`draftsmith doctor`. Returns the exit code: 1 if a check fails."""
    console = Console()
    with console.status("examining") as status:
        checks = run_checks(config, hunt_run=hunt, progress=status.update)
    for check in checks:
        console.print(f"[{COLOURS[check.verdict]}]{check.verdict:<8}[/]", end="", highlight=False)
        console.print(
            without_secrets(text(check, min(console.width, 120))), markup=False, highlight=False, soft_wrap=True
        )
    console.print(summary(checks), markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        out.write_text(to_json(checks), encoding="utf-8")
    return int(any(check.verdict == "fail" for check in checks))


def text(check: Check, width: int) -> str:
    """Name, evidence and remedy, wrapped to `width`; evidence of several lines stays as it is."""
    lines = [check.name]
    for line in check.evidence.splitlines():
        lines += [line] if line.startswith(" ") else textwrap.wrap(line, width - 10, break_on_hyphens=False) or [""]
    if check.verdict in ("warn", "fail"):
        lines += textwrap.wrap(f"remedy: {check.remedy}", width - 10, break_on_hyphens=False)
    return "\n".join([lines[0], *(f"{'':10}{line}".rstrip() for line in lines[1:])])


def summary(checks: Sequence[Check]) -> str:
    """How many of each, and what was ruled out."""
    counts = Counter(check.verdict for check in checks)
    numbers = ", ".join(f"{counts[verdict]} {verdict}" for verdict in COLOURS if counts[verdict])
    ruled_out = ", ".join(check.name for check in checks if check.verdict == "ok")
    return f"{len(checks)} checks: {numbers}; ruled out: {ruled_out or 'nothing'}"


def to_json(checks: Sequence[Check]) -> str:
    """`{"checks": [{"name", "verdict", "evidence", "remedy"}]}`, without secrets."""
    found = [{key: without_secrets(said) for key, said in check.to_json().items()} for check in checks]
    return json.dumps({"checks": found}, indent=2) + "\n"
