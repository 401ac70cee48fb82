"""A compiler cache as one file that travels: PyTorch's own cache artifacts, and who made them.

PyTorch gives artifacts only to the process that has compiled. Their content is what lies in the cache directory, so a
cache left by any process, guarded or not, can be packed later. Entries are pickled code, and unpacking opens them: take
files you trust.

C++ kernels do not travel (PyTorch builds them for the CPU that runs them); their sources do, so a CPU still spends the
seconds of the C++ compiler.
"""

import json
import zipfile
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.compile import private
from draftsmith.compile.cache import (
    UNKNOWN,
    CacheError,
    device_name,
    entries,
    held,
    require_directory,
)
from draftsmith.compile.damage import content_name, files_below, read_whole
from draftsmith.compile.journal import Stamp, append_stamps, parse_stamp, read_stamps
from draftsmith.files import file_aside, is_inside

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Packed:
    """What `pack` wrote, or `unpack` read."""

    file: Path
    torch: str
    devices: tuple[str, ...]  # that wrote the entries
    entries: int
    nbytes: int  # of the file
    other_torch: int = 0  # entries left out because another PyTorch wrote them
    unreadable: int = 0  # entries left out because they are damaged
    here: str = ""  # device of this machine

    @property
    def is_foreign(self) -> bool:
        """Were all entries written on other kinds of machines? Then the compiler here may use none of them."""
        return UNKNOWN not in self.devices and self.here not in self.devices


def pack(file: Path) -> Packed:
    """Writes the cache of this process's PyTorch to one file.

    Raises:
        CacheError: there is nothing to pack, or the file exists.
    """
    if file.exists():
        raise CacheError(f"{file} exists; choose another name or remove it")
    directory = private.cache_directory()
    require_directory(directory)
    private.load_compiler()
    with held(directory):
        stamps = read_stamps(directory)
        found = _collect(directory, stamps)
        artifacts = private.make_artifacts(found.entries)
    if artifacts is None:
        raise CacheError(f"{directory} holds nothing that torch {torch.__version__} has compiled; run it once first")
    devices = tuple(sorted(found.devices))
    manifest = {"format": FORMAT, "torch": torch.__version__, "devices": devices, "entries": len(found.entries)}
    _write(file, manifest, artifacts, [stamp for stamp in stamps if stamp.torch == torch.__version__])
    return Packed(
        file=file,
        torch=torch.__version__,
        devices=devices,
        entries=len(found.entries),
        nbytes=file.stat().st_size,
        other_torch=found.other_torch,
        unreadable=found.unreadable,
        here=device_name(),
    )


def unpack(file: Path) -> Packed:
    """Adds a packed cache to this process's cache directory. What is there stays.

    Raises:
        CacheError: the file is not a packed cache, is damaged, or is another PyTorch's.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            manifest = json.loads(archive.read("manifest.json"))
            artifacts = archive.read("artifacts")
            stamps = [parse_stamp(line) for line in json.loads(archive.read("stamps.json"))]
        if manifest["format"] != FORMAT:
            raise CacheError(f"{file} has format {manifest['format']}, this program reads {FORMAT}; pack it again")
        wrote, devices, count = manifest["torch"], tuple(manifest["devices"]), int(manifest["entries"])
    except OSError as error:
        raise CacheError(f"{file}: {error.strerror or error}") from error
    except CacheError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise CacheError(f"{file} is not a packed compiler cache, or is damaged ({error}); pack it again") from error
    if wrote != torch.__version__:
        raise CacheError(
            f"{file} was packed by torch {wrote}, this is torch {torch.__version__}, which would use none of it; "
            "pack one with this version"
        )
    directory = private.cache_directory()
    require_directory(directory)
    private.load_compiler()
    with held(directory):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            outside = next((key for key in private.artifact_keys(artifacts) or () if not is_inside(key)), None)
            if outside is not None:
                raise CacheError(f"{file} holds an entry {outside!r} that would not be inside the cache; do not use it")
            info = torch.compiler.load_cache_artifacts(artifacts)
        except CacheError:
            raise
        except Exception as error:  # whatever unpickling raises
            raise CacheError(f"{file} holds an entry that cannot be read ({error}); pack it again") from error
        if info is None:
            raise CacheError(f"{file} holds artifacts that torch {torch.__version__} cannot read; pack it again")
        known = set(read_stamps(directory))
        append_stamps(directory, [stamp for stamp in stamps if stamp not in known])
    return Packed(file, wrote, devices, count, file.stat().st_size, here=device_name())


@dataclass(slots=True)
class _Found:
    entries: list[tuple[str, str, Any]] = field(default_factory=list)  # type, key, content
    devices: set[str] = field(default_factory=set)
    other_torch: int = 0
    unreadable: int = 0


def _collect(directory: Path, stamps: list[Stamp]) -> _Found:
    """Entries of the running PyTorch, or of nobody known; PyTorch itself never uses another version's."""
    found = _Found()
    writers = {key: stamp for stamp in reversed(stamps) for key in stamp.keys}
    for name, paths in entries(directory).items():
        kind, _, key = name.partition("/")
        writer = writers.get(name)
        if writer is not None and writer.torch != torch.__version__:
            found.other_torch += 1
            continue
        for path in paths:
            try:
                content = read_whole(path)
            except OSError:
                found.unreadable += 1
                continue
            if path.name == content_name(content):
                found.entries.append((kind, key, content))
                found.devices.add(writer.device if writer else UNKNOWN)
            else:
                found.unreadable += 1
    for path in files_below(directory):  # which variant of a Triton kernel was the fastest: xx/hash.best_config
        if path.suffix == ".best_config":
            try:
                found.entries.append(("autotune", str(path.relative_to(directory)), json.loads(read_whole(path))))
            except (OSError, ValueError):
                found.unreadable += 1
    return found


def _write(file: Path, manifest: dict[str, Any], artifacts: bytes, stamps: list[Stamp]) -> None:
    """Whole or not at all."""
    try:
        with file_aside(file) as aside, zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("manifest.json", json.dumps(manifest, indent=1))
            archive.writestr("stamps.json", json.dumps([asdict(stamp) for stamp in stamps]))
            archive.writestr("artifacts", artifacts)
    except OSError as error:
        raise CacheError(f"{file}: {error.strerror or error}") from error
