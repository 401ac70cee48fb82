"""What cannot be used is said before the checks begin."""

from pathlib import Path

import pytest

from draftsmith import cli
from draftsmith.config import parse_config
from draftsmith.doctor import Check, run_checks
from draftsmith.doctor.check import Subject
from draftsmith.errors import InputError


def test_a_target_that_is_not_there_stops_the_doctor_before_the_first_check(tmp_path: Path) -> None:
    ran: list[str] = []

    def check(subject: Subject) -> Check:
        """Never asked."""
        ran.append("check")
        return Check("check", "ok", "")

    given = {"run": {"dir": str(tmp_path)}, "target": {"model": f"{tmp_path}/none"}, "data": {"train": ["x.jsonl"]}}
    with pytest.raises(InputError, match="none"):
        run_checks(parse_config(given, "mine.yaml"), checks=(check,))
    assert ran == []


def test_a_folder_is_no_place_for_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", str(tmp_path)]) == 2
    assert "is a folder; name a file" in capsys.readouterr().err
