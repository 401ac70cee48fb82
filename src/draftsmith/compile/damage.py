"""What is broken in a compiler cache directory. Reads files only; knows their layout, not PyTorch.

A cut-short library does not always raise: the process may die of SIGBUS while it is loaded. So the guard looks here
before it compiles, not only after a failure.
"""

import ast
import base64
import errno
import fcntl
import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

JOURNAL = "draftsmith-compilations.jsonl"  # ours, see cache.py
GRAPH_MARK = b"# AOT ID:"  # first line of the Python that the compiler writes per graph
ENTRY_FOLDERS = {"fxgraph": "inductor", "aotautograd": "aot_autograd"}  # folder -> PyTorch's name of such entries


def find_damage(directory: Path) -> list[str]:
    """Generated libraries and Python files that cannot be loaded, each as `path: what is wrong`.

    Compilations that need one of them fail, on every start, until it is gone. Files that another process writes at
    this moment are not listed.
    """
    checks = {".so": _library_trouble, ".py": _python_trouble}
    found = []
    for path in sorted(_own_files(directory)):
        if (check := checks.get(path.suffix)) and path.is_file():
            try:
                trouble = check(path)
            except OSError:  # cleared meanwhile, or not ours to read, which `find_unreadable` says
                continue
            if trouble and not _is_being_built(directory, path):
                found.append(f"{path}: {trouble}")
    return found


def find_unreadable(directory: Path) -> list[str]:
    """Cache entries that are not what was written, and whatever cannot be read. The compiler takes such entries for
    absent and writes new ones."""
    found: list[str] = []
    for path in sorted(_own_files(directory, lambda error: found.append(f"{error.filename}: {error.strerror}"))):
        if path.relative_to(directory).parts[0] not in ENTRY_FOLDERS:
            continue
        try:
            if path.name != content_name(read_whole(path)):
                found.append(f"{path}: is not what was written")
        except FileNotFoundError:  # cleared meanwhile
            continue
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
    return found


def foreign_paths(directory: Path) -> list[Path]:
    """What stands in a cache directory and is not the compiler's."""
    return [path for path in sorted(directory.iterdir()) if not _is_compilers(path)] if directory.is_dir() else []


def read_whole(path: Path) -> bytes:
    """The content of a regular file; any other would have a reader wait for a writer.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return path.read_bytes()


def named_by(error: BaseException, directory: Path) -> list[str]:
    """Files of the directory that the loader, not the disk, complains about somewhere in the error's chain."""
    found = []
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        broken_python = isinstance(cause, SyntaxError) and Path(cause.filename or "/").is_relative_to(directory)
        # the loader's texts begin with the path; those of a full disk or a missing right, which stay, with a number
        broken_library = isinstance(cause, ImportError | OSError)
        if broken_python or (broken_library and text.startswith(f"{directory}{os.sep}")):
            found.append(text)
        cause = cause.__cause__ or cause.__context__
    return found


def files_below(directory: Path, failed: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Every file, whatever disappears meanwhile. `failed` hears of folders that cannot be read."""
    for folder, _, names in os.walk(directory, onerror=failed):
        yield from (Path(folder, name) for name in names)


def _own_files(directory: Path, failed: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Files of the compiler's: a directory that others use, too, may hold Python that does not parse."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if _is_compilers(path):
            yield from files_below(path, failed) if path.is_dir() else [path]


def _is_compilers(path: Path) -> bool:
    if path.is_symlink():
        return False
    known = {*ENTRY_FOLDERS, "locks", "triton", "dynamo", "precompiled_headers", "cache", "__pycache__", JOURNAL}
    return path.name in known or (path.is_dir() and re.fullmatch("[a-z0-9]{2}", path.name) is not None)


def content_name(content: bytes) -> str:
    """The name that PyTorch gives a file of this content."""
    return base64.b32encode(hashlib.sha256(content).digest())[:51].decode().lower()


def _library_trouble(path: Path) -> str | None:
    with path.open("rb") as file:
        head, size = file.read(64), os.fstat(file.fileno()).st_size
    if size == 0:
        return "is empty"
    if head[:4] in (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"):  # Mach-O: looked at no further
        return None
    if head[:4] != b"\x7fELF":
        return "is not a library"
    if len(head) < 64:
        return f"is cut short at {size} bytes"
    sections_at, section_bytes, sections = (*struct.unpack_from("<Q", head, 40), *struct.unpack_from("<2H", head, 58))
    need = sections_at + section_bytes * sections  # linkers write the table of sections last
    return f"is cut short: {size} of {need} bytes" if size < need else None


def _python_trouble(path: Path) -> str | None:
    source = path.read_bytes()
    if not source.strip():
        return "is empty"
    if path.stem == "c" + content_name(source.strip()):
        return None
    if source.startswith(GRAPH_MARK):  # others carry more than their content in their names
        return "is cut short or changed"
    try:
        ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return f"does not parse: {error}"
    return None


def _is_being_built(directory: Path, path: Path) -> bool:
    """Does a process hold the lock under which the compiler writes this file?"""
    try:
        lock = os.open(directory / "locks" / f"{path.name.split('.')[0]}.lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
