"""Splits of devices: what is accepted, what is refused, and why."""

import pytest

from draftsmith.errors import ConfigError
from draftsmith.pipeline.topology import Topology, choose_threads, choose_topology


def resolve(wanted: object, device: str = "cpu", gpus: int = 0) -> Topology:
    value = choose_topology(wanted, device, gpus).value  # type: ignore[arg-type]
    assert isinstance(value, Topology)
    return value


def test_splits_number_the_workers() -> None:
    assert resolve("3+2") == Topology(("cpu:0", "cpu:1", "cpu:2"), ("cpu:3", "cpu:4"))
    assert resolve("5+3", "cuda", 8).drafter == ("cuda:5", "cuda:6", "cuda:7")
    assert resolve({"target": ["cuda:3"], "drafter": ["cuda:0", "cuda:1"]}, "cuda", 4).target == ("cuda:3",)


def test_one_gpu_carries_both_roles() -> None:
    both = Topology(("cuda:0",), ("cuda:0",))
    assert resolve("1+1", "cuda", 1) == resolve("auto", "cuda", 1) == both


def test_auto_has_a_reason() -> None:
    assert resolve("auto") == Topology(("cpu:0",), ("cpu:1",))
    assert resolve("auto", "cuda", 8).workers == 8
    assert "rule of thumb" in choose_topology("auto", "cuda", 8).reason


@pytest.mark.parametrize(
    ("wanted", "device", "gpus", "message"),
    [
        ("0+1", "cpu", 0, "give T"),
        ("3", "cpu", 0, "give T"),
        ("2+2", "cuda", 3, "has 3 CUDA"),
        ({"target": [], "drafter": ["cpu:0"]}, "cpu", 0, "at least one"),
        ({"target": ["cpu:0", "cpu:0"], "drafter": ["cpu:1"]}, "cpu", 0, "twice"),
        ({"target": ["cuda:0"], "drafter": ["cpu:1"]}, "cpu", 0, "expected cpu"),
        ({"target": ["gpu0"], "drafter": ["cuda:1"]}, "cuda", 2, "expected cuda"),
    ],
)
def test_impossible_splits_are_refused(wanted: object, device: str, gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_topology(wanted, device, gpus)  # type: ignore[arg-type]


def test_cores_are_shared_out() -> None:
    assert choose_threads(3, resolve("1+1")).value == 3
    assert choose_threads(None, Topology(tuple(f"cpu:{n}" for n in range(900)), ("cpu:900",))).value == 1
