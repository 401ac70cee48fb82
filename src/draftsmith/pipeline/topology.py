"""Which devices run the target and which train drafter replicas; decided once, with the reason."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from draftsmith.decisions import Decision
from draftsmith.errors import ConfigError
from draftsmith.pipeline.machine import cpu_cores


@dataclass(frozen=True, slots=True)
class Topology:
    """Names of the workers: `cpu:n` is a worker's name (all share the CPU), `cuda:n` a device."""

    target: tuple[str, ...]
    drafter: tuple[str, ...]

    def __str__(self) -> str:
        split = f"{len(self.target)}+{len(self.drafter)}"
        return f"{split} (target {', '.join(self.target)}; drafter {', '.join(self.drafter)})"

    @property
    def workers(self) -> int:
        return len(self.target) + len(self.drafter)


def device_of(worker: str) -> torch.device:
    """The torch device behind a worker's name."""
    return torch.device("cpu") if worker.startswith("cpu") else torch.device(worker)


def choose_device(wanted: str, cuda_devices: int) -> Decision:
    """`auto` takes CUDA where it is there; a device that was asked for and is missing is an error, never replaced."""
    if wanted == "cuda" and not cuda_devices:
        raise ConfigError("device: cuda was asked for, but there is no CUDA device; use device: cpu or auto")
    if wanted == "auto":
        return Decision("device", "cuda" if cuda_devices else "cpu", f"{cuda_devices or 'no'} CUDA device(s)")
    return Decision("device", wanted, "set in the config")


def choose_topology(wanted: str | Mapping[str, Sequence[str]], device: str, cuda_devices: int) -> Decision:
    """Resolves `T+D`, `auto` or explicit lists to a `Topology`.

    Raises:
        ConfigError: not of these forms, or it names devices that are not there.
    """
    if isinstance(wanted, Mapping):
        topology = Topology(tuple(wanted.get("target", ())), tuple(wanted.get("drafter", ())))
        _check_names(topology, device, cuda_devices)
        return Decision("topology", topology, "set in the config")
    if wanted == "auto":
        if device == "cpu":
            return Decision("topology", _numbered(1, 1, "cpu"), "CPU: one target and one drafter thread overlap")
        if cuda_devices == 1:
            return Decision("topology", Topology(("cuda:0",), ("cuda:0",)), "one GPU carries both roles")
        targets = max(1, cuda_devices // 4)
        reason = f"rule of thumb for {cuda_devices} GPUs: a quarter runs the target; large targets want more"
        return Decision("topology", _numbered(targets, cuda_devices - targets, "cuda"), reason)
    match = re.fullmatch(r"([1-9][0-9]{0,2})\+([1-9][0-9]{0,2})", wanted)
    if not match:
        raise ConfigError(
            f"topology is {wanted[:40]!r}: give T+D (like 5+3, each below 1000), auto, or lists of target and drafter "
            "devices"
        )
    targets, drafters = int(match[1]), int(match[2])
    if device == "cuda" and (targets, drafters, cuda_devices) == (1, 1, 1):
        topology = Topology(("cuda:0",), ("cuda:0",))
    else:
        topology = _numbered(targets, drafters, device)
    _check_names(topology, device, cuda_devices)
    return Decision("topology", topology, "set in the config")


def _numbered(targets: int, drafters: int, kind: str) -> Topology:
    names = [f"{kind}:{n}" for n in range(targets + drafters)]
    return Topology(tuple(names[:targets]), tuple(names[targets:]))


def _check_names(topology: Topology, device: str, cuda_devices: int) -> None:
    if not topology.target or not topology.drafter:
        raise ConfigError("topology: at least one target and one drafter device are needed")
    for role, names in (("target", topology.target), ("drafter", topology.drafter)):
        if len(set(names)) < len(names):
            raise ConfigError(f"topology.{role} names a device twice: {', '.join(names)}")
        for name in names:
            match = re.fullmatch(r"(cpu|cuda):([0-9]{1,4})", name)
            if not match or match[1] != device:
                raise ConfigError(f"topology.{role} has {name[:40]!r}, expected {device}:0, {device}:1, ...")
            if match[1] == "cuda" and int(match[2]) >= cuda_devices:
                raise ConfigError(f"topology.{role} has {name}, but this machine has {cuda_devices} CUDA device(s)")


def choose_threads(wanted: int | None, topology: Topology, cores: int | None = None) -> Decision:
    """Intra-op threads of every CPU worker: cores (default: this machine's) shared out, at least one each."""
    if wanted is not None:
        return Decision("threads per worker", wanted, "set in the config")
    cores = cores or cpu_cores()
    if device_of(topology.drafter[0]).type == "cuda":
        return Decision("threads per worker", max(1, cores // 2), f"{cores} cores; workers compute on their GPUs")
    share = max(1, cores // topology.workers)
    return Decision("threads per worker", share, f"{cores} cores for {topology.workers} workers")
