"""What several rooms do with files."""

import hashlib
from pathlib import Path, PurePosixPath


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
