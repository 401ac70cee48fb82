"""Damage in the compiler's cache directory. Reads files only."""

import ast
import struct
from pathlib import Path


def find_damage(directory: Path) -> list[str]:
    """Generated libraries and Python files that cannot be loaded, each as `path: what is wrong`."""
    checks = {".so": _library_trouble, ".py": _python_trouble}
    found = []
    for path in sorted(directory.rglob("*")):
        if (check := checks.get(path.suffix)) and path.is_file() and (trouble := check(path)):
            found.append(f"{path}: {trouble}")
    return found


def _library_trouble(path: Path) -> str | None:
    content = path.read_bytes()
    if content[:4] != b"\x7fELF" or len(content) < 64:
        return "is not a library"
    need = struct.unpack_from("<Q", content, 40)[0] + content[58] * content[60]
    return f"is cut short: {len(content)} of {need} bytes" if len(content) < need else None


def _python_trouble(path: Path) -> str | None:
    source = path.read_bytes()
    try:
        ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return f"does not parse: {error}"
    return None if source.strip() else "is empty"
