"""The journal: lines that are none are said and left out, and so is a journal that cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.compile.cache import survey
from draftsmith.compile.damage import JOURNAL
from draftsmith.compile.journal import read_stamps

LINE: dict[str, Any] = {
    "when_s": 1,
    "torch": "2",
    "device": "cpu",
    "name": "f",
    "signature": "",
    "seconds": 2,
    "keys": [],
}


@pytest.mark.parametrize("bad", [5, None, [], {}, LINE | {"seconds": "2"}, LINE | {"torch": 2}, LINE | {"keys": [1]}])
def test_a_line_of_other_types_is_left_out(bad: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / JOURNAL).write_text(f"{json.dumps(bad)}\n{json.dumps(LINE)}\n")
    assert survey(tmp_path).compile_s == 2
    assert "1 lines cannot be read" in caplog.text


def test_a_folder_in_the_journals_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / JOURNAL).mkdir()
    assert read_stamps(tmp_path) == []
    assert "journal of the compiler cache cannot be read" in caplog.text
