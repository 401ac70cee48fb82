"""Faults planted by what the machine has for them: small file systems, limits of the process, signals."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, nbytes: int) -> Iterator[Path]:
    """A file system of this size, mounted at `place`. Skips the test where mounting is not allowed."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "draftsmith-test", str(place)]
    if not os.path.exists("/proc/mounts") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody may write a folder: by its permissions, and for root, who may write everything, by a mount."""
    if os.geteuid():
        mode = folder.stat().st_mode
        folder.chmod(0o555)
        yield
        folder.chmod(mode)
        return
    for command in (["mount", "--bind", folder, folder], ["mount", "-o", "remount,bind,ro", folder]):
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("root may write everything here, and may not mount a read-only folder")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond this size: EFBIG, where a full disk says ENOSPC. Needs no rights."""
    with _limit(resource.RLIMIT_FSIZE, nbytes):
        yield


@contextmanager
def no_handles() -> Iterator[None]:
    """This process can open nothing more."""
    probe = os.dup(0)  # the lowest free number
    os.close(probe)
    with _limit(resource.RLIMIT_NOFILE, probe):
        yield


@contextmanager
def _limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def handles() -> dict[str, str]:
    """What this process has open, by number. Skips the test where the system does not tell."""
    found = {}
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no list of open files here")
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # that of the list itself
            continue
    return found
