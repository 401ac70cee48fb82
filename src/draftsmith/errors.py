"""Errors that a user can mend: one line, naming the place and the remedy; the command line prints nothing else."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

_NO_SPACE = "free some space, or choose a place that has it"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_READER = (errno.EPIPE, errno.EIO, errno.EBADF)  # of what is printed: a pipe, a terminal that has gone
_NO_PERMISSION = "choose a place that you may write, or change its permissions"
_REMEDIES = {
    **dict.fromkeys(NO_ROOM, _NO_SPACE),
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: _NO_PERMISSION,
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "give the path of a file",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "one of its links leads back to itself; mend it",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "close other programs; the whole machine has too many open files",
    errno.EIO: "the disk failed; look into the system's log",
}


# What reading YAML may raise: beside its own, a date that is none, a character beyond Unicode, lists in lists in lists.
NOT_YAML: tuple[type[Exception], ...] = (yaml.YAMLError, ValueError, OverflowError, RecursionError)


class InputError(ValueError):
    """Something a user gave (a file, a model, a value) cannot be used. Exit code 1."""

    exit_code = 1


class NothingToTrainOnError(InputError):
    """No conversation is left. `rejects` are the lines of `rejects.jsonl`, so that their reasons are not lost."""

    def __init__(self, message: str, rejects: list[str]) -> None:
        super().__init__(message)
        self.rejects = rejects


class ConfigError(InputError):
    """A configuration or an argument is wrong. Exit code 2."""

    exit_code = 2


def explained(error: BaseException) -> str | None:
    """One line for an error whose cause lies in the machine (disk, permissions, memory). None for any other."""
    text = " ".join(str(error).split())
    if is_out_of_memory(error):
        return f"out of memory ({text or 'no further details'}); ask for less at once, or use a larger machine"
    if isinstance(error, BrokenPipeError):
        return "the program that read the output has ended"
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}; {_REMEDIES[error.errno]}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of the host or of a device did not suffice, as Python, PyTorch or CUDA say it."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "allocate memory" in str(error)
        or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)
    )


@contextmanager
def written_below(place: object) -> Iterator[None]:
    """Gives errors of the operating system that name no file (a full disk) the place that was being written."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(place)
        raise


class StoppedError(RuntimeError):
    """Raised in a worker that waits when its neighbour has failed or the run ends; never the cause itself."""
