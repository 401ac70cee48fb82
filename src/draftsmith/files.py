"""What several rooms do with files: locks, and writing so that a kill or a full disk leaves the old or the new, whole.

What is written for `X` lies in a folder `.X.new` beside it until it is whole and durable; a folder that is being
replaced is called `.X.old` for a moment. A killed process may leave both: `recover` clears up after it.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType

from draftsmith.errors import ConfigError

LOCK = ".lock"  # in a folder that one process holds
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM)  # no folder's fault


class FileLock:
    """The kernel's lock on a file, made if need be. It goes with the process: a kill leaves none behind."""

    def __init__(self, path: Path, *, alone: bool = True) -> None:
        """Takes it at once; not `alone`: together with others who also take it so.

        Raises:
            BlockingIOError: another process holds it.
            OSError: the file cannot be opened.
        """
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_NB | (fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        except OSError:
            self._file.close()
            raise

    def release(self) -> None:
        """Gives it back; the second time does nothing."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # closing would not do while a child that inherited it lives
            self._file.close()

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def lock_folder(folder: Path, setting: str) -> FileLock:
    """Makes a folder, and holds it until the lock is released. `setting` is what the user calls it.

    Raises:
        ConfigError: another process holds it, or this user cannot make or write it.
        OSError: the machine has no room or handles left, or its disk failed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / LOCK)
    except BlockingIOError:
        raise ConfigError(
            f"{setting} {folder} is in use by another draftsmith process; wait for its end, or choose another"
        ) from None
    except OSError as error:
        if error.errno in _MACHINE:
            raise
        raise ConfigError(f"{setting} {folder} cannot be written: {error.strerror}; choose another") from None


def sync(path: Path) -> None:
    """Makes a file, or a folder's list of files, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def folder_aside(folder: Path) -> Iterator[Path]:
    """An empty folder to write into. At the end it is made durable and takes the place of `folder`; after an error
    everything is as before.

    Raises:
        OSError: with `folder` as its place.
    """
    aside = _aside(folder)
    try:
        recover(folder)
        aside.mkdir(parents=True)
        yield aside
        replace_folder(aside, folder)
    except OSError as error:
        raise _placed(error, folder) from None
    finally:
        recover(folder)


@contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """A name to write a file to. At the end it is made durable and takes the place of `path`; after an error everything
    is as before.

    Raises:
        OSError: with `path` as its place.
    """
    aside = _aside(path)
    try:
        remove(aside)
        aside.mkdir()
        yield aside / path.name
        sync(aside / path.name)
        (aside / path.name).replace(path)
        sync(path.parent)
    except OSError as error:
        raise _placed(error, path) from None
    finally:
        remove(aside)


def write_text(path: Path, parts: Iterable[str]) -> None:
    """Writes a text file in one step."""
    with file_aside(path) as aside, aside.open("w", encoding="utf-8") as out:
        out.writelines(parts)


def replace_folder(aside: Path, folder: Path) -> None:
    """Makes `aside` durable and puts it in the place of `folder`."""
    for item in [*aside.iterdir(), aside]:
        sync(item)
    old = _old(folder)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    sync(folder.parent)
    remove(old)


def remove(path: Path) -> None:
    """Deletes a file or a folder with all that is in it; no error if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Deletes a folder that others may look for: in one step it is out of their sight."""
    if folder.is_dir():
        folder.rename(_aside(folder))
        remove(_aside(folder))


def recover(path: Path) -> None:
    """Undoes what a process had begun with a file or folder when it was killed: what was written aside is removed, and
    what was to be replaced is brought back."""
    remove(_aside(path))
    if path.exists():
        remove(_old(path))
    elif _old(path).exists():
        _old(path).rename(path)


def recover_all(folder: Path, pattern: str) -> None:
    """`recover` for all that a killed process may have left in a folder under names that match a glob pattern."""
    names = {left.name[1:-4] for suffix in ("new", "old") for left in folder.glob(f".{pattern}.{suffix}")}
    for name in sorted(names):
        recover(folder / name)


def is_damage(error: Exception) -> bool:
    """Whether an error while reading says that the content is bad, and not that this process may not or cannot read."""
    return not isinstance(error, OSError) or error.errno in (None, errno.ENOENT, errno.EIO, errno.ENOTDIR, errno.EISDIR)


def file_hash(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_inside(name: object) -> bool:
    """Whether a name that a file gives leads to a place below the folder it is read from."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _placed(error: OSError, path: Path) -> OSError:
    """The error, speaking of what the user knows instead of a name aside."""
    if error.errno is not None:
        error.filename, error.filename2 = str(path), None
    return error
