"""`draftsmith cache` as a person reads it."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftsmith.compile import carry
from draftsmith.compile.cache import UNKNOWN, CacheError, Cost, Survey, clear, survey
from draftsmith.compile.private import cache_directory
from draftsmith.errors import ConfigError, InputError

SHOWN = 20  # lines of a list that may be long


def show_info() -> None:
    """Directory, files per kind, age, writers, what is broken.

    Raises:
        InputError: there is no directory that can be read.
    """
    with _said():
        found = survey(cache_directory())
    print("\n".join(_info(found, time.time())))


def show_pack(file: Path) -> None:
    """Packs and says what went in and what did not.

    Raises:
        InputError: nothing to pack, or the file cannot be written.
    """
    with _said():
        packed = carry.pack(file)
    print(f"{file}: {packed.entries} entries, {_size(packed.nbytes)}, torch {packed.torch}, {_devices(packed)}")
    if packed.other_torch:
        print(f"left out: {packed.other_torch} graphs that another torch compiled; pack them with that torch")
    if packed.unreadable:
        print(f"left out: {packed.unreadable} damaged entries")
    print(
        "C++ kernels are not in it: a CPU builds them again from their sources, which takes its compiler some seconds"
    )


def show_unpack(file: Path) -> None:
    """Unpacks and says what came in.

    Raises:
        InputError: the file is none of ours, damaged, or another torch's.
    """
    with _said():
        packed = carry.unpack(file)
    print(f"{cache_directory()}: {packed.entries} entries added, torch {packed.torch}, {_devices(packed)}")
    if packed.is_foreign:
        print(f"warning: this machine is {packed.here}; what was compiled for another may not be used here")


def show_clear(ask: bool) -> bool:
    """Says what will be compiled again and for how long, asks, and deletes. Returns whether it did.

    Raises:
        ConfigError: there is nobody to ask.
        InputError: another process compiles, or foreign files are there.
    """
    with _said():
        found = survey(cache_directory())
    if not found.kinds and not found.set_aside:
        print(f"{found.directory} is empty; nothing to delete")
        return True
    print("\n".join(_bill(found)))
    if ask:
        if not sys.stdin.isatty():
            raise ConfigError("cache clear asks before it deletes, and nobody is there to answer; add --yes")
        if input("Delete? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing deleted")
            return False
    with _said():
        clear(found.directory)
    print("deleted")
    return True


@contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except CacheError as error:
        raise InputError(str(error)) from error


def _info(found: Survey, now_s: float) -> list[str]:
    lines = [f"{found.directory}"]
    if found.oldest_s is None or found.newest_s is None:
        lines.append("  empty")
    else:
        ages = f"oldest {_age(now_s - found.oldest_s)}, newest {_age(now_s - found.newest_s)}"
        lines.append(f"  {sum(kind.files for kind in found.kinds)} files, {_size(found.nbytes)}, {ages}")
        width = max(len(kind.name) for kind in found.kinds)
        lines += [f"    {kind.name:<{width}}  {kind.files:>6}  {_size(kind.nbytes):>10}" for kind in found.kinds]
    for writer in found.writers:
        who = f"torch {writer.torch} on {writer.device}"
        lines.append(f"  {writer.graphs} graphs written by {'unknown' if writer.torch == UNKNOWN else who}")
    if found.costs:
        lines.append(f"  {_count(len(found.costs), 'signature')} on record, compiled in {found.compile_s:.1f} s")
    lines += _listed("damaged, will be set aside at the next compilation", found.damage)
    lines += _listed("not made by the compiler, keeps it from being cleared", tuple(map(str, found.foreign)))
    lines += _listed("unreadable, will be compiled anew without ado", found.unreadable)
    lines += [f"  set aside earlier: {path}" for path in found.set_aside]
    return lines


def _bill(found: Survey) -> list[str]:
    costs = sorted(found.costs, key=lambda cost: -cost.seconds)
    graphs, unknown = (
        sum(writer.graphs for writer in found.writers if writer.torch == UNKNOWN or which) for which in (True, False)
    )
    lines = [f"{found.directory}: {sum(kind.files for kind in found.kinds)} files, {_size(found.nbytes)}"]
    lines += [f"and {path}, set aside earlier" for path in found.set_aside]
    lines.append(f"What it will cost: {found.compile_s:.1f} s for {_count(len(costs), 'signature')} on record")
    lines += [f"  {cost.seconds:8.1f} s  {_signature(cost)}" for cost in costs[:SHOWN]]
    if len(costs) > SHOWN:
        lines.append(f"  {sum(cost.seconds for cost in costs[SHOWN:]):8.1f} s  {len(costs) - SHOWN} more")
    if unknown:
        lines.append(f"  unknown      for {unknown} of {graphs} graphs, which the guard did not compile")
    return lines


def _signature(cost: Cost) -> str:
    return f"{cost.name}({cost.signature}), torch {cost.torch}, {cost.device}"


def _listed(title: str, lines: tuple[str, ...]) -> list[str]:
    if not lines:
        return []
    more = [f"    and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"  {title}: {len(lines)}", *(f"    {line}" for line in lines[:SHOWN]), *more]


def _devices(packed: carry.Packed) -> str:
    return f"compiled on {'; '.join(packed.devices)}" if packed.devices else "compiled nowhere known"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
