"""Cache directories that are none, that others use, too, or that hold what is no file."""

import os
from pathlib import Path

import pytest

from draftsmith import cli
from draftsmith.compile import cache
from draftsmith.compile.cache import CompilerCache, survey
from draftsmith.compile.damage import find_damage, find_unreadable, foreign_paths
from draftsmith.compile.private import cache_directory


@pytest.mark.parametrize("command", [["info"], ["clear", "--yes"], ["pack", "out.zip"]])
def test_a_file_in_the_directorys_place_is_named(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("not a directory")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert cli.main(["cache", *command]) == 1
    assert "cache is not a directory; set TORCHINDUCTOR_CACHE_DIR" in capsys.readouterr().err


def test_what_is_no_file_is_said_and_not_waited_for(tmp_path: Path) -> None:
    entry = tmp_path / "fxgraph" / "ab" / "key"
    entry.mkdir(parents=True)
    os.mkfifo(entry / "pipe")  # a reader would wait for ever
    (entry / "loop").symlink_to("loop")
    (tmp_path / "ab").mkdir()
    os.mkfifo(tmp_path / "ab" / "pipe.py")
    (tmp_path / "ab" / "loop.so").symlink_to("loop.so")
    assert find_damage(tmp_path) == []
    words = find_unreadable(tmp_path)
    assert [Path(line.partition(":")[0]).name for line in words] == ["loop", "pipe"]
    assert "is not a file" in words[1]
    assert len(survey(tmp_path).unreadable) == 2


def test_files_of_others_are_neither_damage_nor_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "old.py").write_text("print 1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
    assert find_damage(directory) == []
    (directory / "ab").mkdir()
    (directory / "ab" / "graph.py").write_text("# AOT ID: cut")
    assert CompilerCache().run(lambda: 5) == 5
    assert (directory / "old.py").exists()
    assert "stays where it is: not made by the compiler" in caplog.text
    assert survey(cache_directory()).foreign == (directory / "old.py",) == tuple(foreign_paths(directory))


def test_a_directory_of_the_compilers_alone_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "cache"
    (directory / "ab").mkdir(parents=True)
    (directory / "ab" / "graph.py").write_text("# AOT ID: cut")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
    mine = CompilerCache()
    assert mine.run(lambda: 5) == 5
    assert [aside.kept_as for aside in mine.set_aside] == cache.damaged_siblings(directory)
