"""Locks of the kernel, and files and folders that appear whole."""

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.errors import ConfigError
from draftsmith.files import (
    FileLock,
    file_aside,
    folder_aside,
    is_damage,
    lock_folder,
    recover,
    recover_all,
    remove,
    remove_folder,
    write_text,
)
from draftsmith.tensors import open_tensors, save_tensors
from faults import handles, largest_file, no_handles


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_lock_is_held_alone_or_together(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path, alone=False) as first, FileLock(path, alone=False):
        with pytest.raises(BlockingIOError):
            FileLock(path)
        first.release()
        first.release()
    with FileLock(path), pytest.raises(BlockingIOError):
        FileLock(path, alone=False)
    FileLock(path).release()


def test_a_lock_that_is_given_back_is_free_though_a_child_has_inherited_it(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    number = lock._file.fileno()
    with subprocess.Popen(["sleep", "60"], pass_fds=[number]) as child:
        lock.release()
        FileLock(tmp_path / "lock").release()
        child.kill()


def test_a_lock_that_is_refused_leaves_nothing_open(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock"):
        before = handles()
        with pytest.raises(BlockingIOError):
            FileLock(tmp_path / "lock")
        assert handles() == before


def test_a_folder_that_is_in_use_or_cannot_be_made_is_named(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path / "a" / "b", "--out"),
        pytest.raises(ConfigError, match=r"^--out \S+/a/b is in use by another draftsmith process; wait for its end"),
    ):
        lock_folder(tmp_path / "a" / "b", "--out")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run\.dir \S+/file/b cannot be written: Not a directory; choose another$"):
        lock_folder(tmp_path / "file" / "b", "run.dir")
    with no_handles(), pytest.raises(OSError, match="Too many open files") as caught:
        lock_folder(tmp_path / "a", "run.dir")
    assert not isinstance(caught.value, ConfigError), "the folder is as good as any other"


def test_a_text_is_the_old_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "text"
    write_text(path, ["one\n", "ünd\n"])
    with largest_file(2), pytest.raises(OSError, match=r"File too large: '\S+/text'"):
        write_text(path, ["something longer"])
    with pytest.raises(ZeroDivisionError):
        write_text(path, (str(1 // n) for n in (1, 0)))
    assert path.read_text(encoding="utf-8") == "one\nünd\n"
    assert names(tmp_path) == {"text"}


def test_a_file_is_readable_by_whom_the_user_lets(tmp_path: Path) -> None:
    """A server under another user reads a drafter; the library alone would write it for its owner only."""
    (tmp_path / "plain").touch()
    save_tensors({"a": torch.ones(3)}, tmp_path / "tensors")
    write_text(tmp_path / "text", ["x"])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(set(modes.values())) == 1, modes
    assert torch.equal(load_file(tmp_path / "tensors")["a"], torch.ones(3))


def test_tensors_that_find_no_room_or_no_handle_say_so(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(3)}, tmp_path / "a")
    with largest_file(1000), pytest.raises(OSError, match=r"File too large: '\S+/b'") as caught:
        save_tensors({"a": torch.ones(3000)}, tmp_path / "b")
    assert caught.value.errno == errno.EFBIG
    with no_handles(), pytest.raises(OSError, match="Too many open files"), open_tensors(tmp_path / "a"):
        pass


def test_a_folder_is_the_old_or_the_new(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    for value in ("1", "2"):
        with folder_aside(folder) as aside:
            (aside / value).write_text(value)
            assert names(folder) == {"1"} if folder.exists() else value == "1"
        assert names(folder) == {value}

    def fail(error: BaseException) -> None:
        with folder_aside(folder) as aside:
            (aside / "3").write_text("3")
            raise error

    for error in (OSError(errno.EIO, "gone", "somewhere"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            fail(error)
        assert getattr(caught.value, "filename", str(folder)) == str(folder)
        assert names(folder) == {"2"}
    assert names(folder.parent) == {"folder"}


@pytest.mark.parametrize(
    ("there", "left"),
    [
        (["x", ".x.new"], "x"),  # killed while it was written
        (["x", ".x.old"], "x"),  # killed after it was shown
        ([".x.old", ".x.new"], ".x.old"),  # killed between the two renames
        ([".x.new"], None),
        ([".x.old"], ".x.old"),
    ],
)
def test_what_a_kill_left_is_cleared_up(there: list[str], left: str | None, tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    recover(tmp_path / "x")
    assert names(tmp_path) == ({"x"} if left else set())
    assert left is None or (tmp_path / "x" / "which").read_text() == left


def test_only_what_is_ours_is_cleared_up(tmp_path: Path) -> None:
    for name in (".step-3.new", ".step-5.old", ".notes.old", ".step-7.keep", "step-9"):
        (tmp_path / name).mkdir()
    recover_all(tmp_path, "step-*")
    assert names(tmp_path) == {"step-5", ".notes.old", ".step-7.keep", "step-9"}


def test_removing_takes_files_folders_and_links_but_not_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for name in ("link", "folder", "nothing"):
        remove(tmp_path / name)
    remove_folder(tmp_path / "nothing")
    assert names(tmp_path) == {"kept"}
    remove(tmp_path / "kept" / "file")
    remove_folder(tmp_path / "kept")
    assert names(tmp_path) == set()


def test_an_aside_of_a_killed_process_is_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / ".a.new").mkdir()
    (tmp_path / ".a.new" / "half").touch()
    with folder_aside(tmp_path / "a") as aside:
        assert names(aside) == set()
    (tmp_path / ".b.new").write_text("a file of that name")
    with file_aside(tmp_path / "b") as aside:
        aside.write_text("b")
    assert names(tmp_path) == {"a", "b"}


@pytest.mark.parametrize(
    ("error", "damage"),
    [
        (ValueError("no JSON"), True),
        (KeyError("w"), True),
        (FileNotFoundError(errno.ENOENT, "x"), True),
        (FileNotFoundError("what safetensors says"), True),
        (OSError(errno.EIO, os.strerror(errno.EIO)), True),
        (IsADirectoryError(errno.EISDIR, "x"), True),
        (PermissionError(errno.EACCES, "x"), False),
        (OSError(errno.EMFILE, "x"), False),
        (OSError(errno.ENOMEM, "x"), False),
    ],
)
def test_what_may_not_be_read_is_not_damaged(error: Exception, damage: bool) -> None:
    assert is_damage(error) is damage
