"""What a run may use: cores, host memory, devices. Found here, or described by a file for a machine elsewhere."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.config import MachineFile

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator. All of a machine's devices are CUDA devices, `cuda:n` by their place in the list."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores this process may use, bytes of host memory, and the devices. `here`: this process runs on it."""

    cores: int
    host_bytes: int
    devices: tuple[Device, ...]
    here: bool = False

    def __str__(self) -> str:
        kinds = sorted({(d.name, d.nbytes) for d in self.devices})
        counts = [(sum((d.name, d.nbytes) == kind for d in self.devices), *kind) for kind in kinds]
        devices = ", ".join(f"{count} x {name} of {nbytes / GIB:.0f} GiB" for count, name, nbytes in counts)
        return f"{self.cores} cores, {self.host_bytes / GIB:.1f} GiB of host memory, {devices or 'no device'}"

    def capacity(self, place: str) -> int:
        """Bytes of `host` or of `cuda:n`."""
        return self.host_bytes if place == "host" else self.devices[int(place.removeprefix("cuda:"))].nbytes


def this_machine() -> Machine:
    """The machine this process runs on."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(n) for n in range(count)]
    return Machine(cpu_cores(), host_bytes(), tuple(Device(d.name, d.total_memory) for d in found), here=True)


def described_machine(file: MachineFile) -> Machine:
    """The machine that a file describes."""
    devices = file.devices
    device = Device(devices.name, round(devices.memory_gib * GIB)) if devices else None
    return Machine(
        file.cores, round(file.host_memory_gib * GIB), (device,) * devices.count if devices and device else ()
    )


def cpu_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_bytes() -> int:
    """Physical memory, or the limit of the control group this process runs in, if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes")]
    given = [int(text) for path in limits if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([physical, *given])
