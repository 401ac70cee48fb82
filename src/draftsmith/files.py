"""What several rooms do with files."""

import hashlib
from pathlib import Path


def file_hash(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
