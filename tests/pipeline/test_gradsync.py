"""One gradient for all replicas: the same bits whoever comes first, and nobody left waiting."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.errors import StoppedError
from draftsmith.pipeline import gradsync
from draftsmith.pipeline.gradsync import FlatGradients, GradientSync, clip_coefficient

PARTS = (1e8, 1.0, -1e8)  # in fp32 their sum depends on the order: (1e8 + 1) - 1e8 is 0, (1e8 - 1e8) + 1 is 1


def replica(value: float) -> FlatGradients:
    """A replica whose gradient is `value` everywhere."""
    gradients = FlatGradients([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))])
    gradients.flat.fill_(value)
    return gradients


def together(*bodies: Callable[[], Any]) -> list[Any]:
    """What each body returned or raised, each in a thread of its own; a thread that hangs fails the test."""
    outcomes: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            outcomes[number] = bodies[number]()
        except StoppedError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(n,), name=f"replica {n}", daemon=True) for n in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads), "a replica waits for ever"
    return outcomes


def test_gradients_are_views_of_one_buffer() -> None:
    first, second, third = (nn.Parameter(torch.full(shape, 2.0)) for shape in ((2, 3), (2,), (1, 1)))
    gradients = FlatGradients(iter([first, second, third]))
    assert gradients.parameters == [first, second, third]
    assert gradients.flat.tolist() == [0.0] * 9
    (first * torch.arange(6.0).view(2, 3)).sum().backward()
    (second**2).sum().backward()
    (third * 7).sum().backward()
    assert gradients.flat.tolist() == [0, 1, 2, 3, 4, 5, 4, 4, 7]
    (second**2).sum().backward()
    assert gradients.flat.tolist() == [0, 1, 2, 3, 4, 5, 8, 8, 7], "a second backward adds"
    gradients.zero()
    assert not any(parameter.grad.any() for parameter in gradients.parameters)


def test_a_backward_that_adds_something_is_noted() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    gradients = FlatGradients([unused, used])
    assert gradients.touched is False
    used.sum().backward()
    assert gradients.touched is True
    gradients.touched = False
    torch.ones(2, requires_grad=True).sum().backward()
    assert gradients.touched is False, "that was another's"
    unused.sum().backward()
    assert gradients.touched is True


def test_the_buffer_lies_where_the_parameters_do() -> None:
    meta = torch.device("meta")
    gradients = FlatGradients([nn.Parameter(torch.zeros(3, device=meta))])
    assert (gradients.flat.device, gradients.flat.shape) == (meta, (3,))


def test_one_replica_keeps_what_it_has() -> None:
    alone, totals = replica(2.0), torch.tensor([5.0])
    assert GradientSync(1).reduce(0, alone, totals) is totals
    assert alone.flat.tolist() == [2.0] * 10


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(3))), ids=str)
def test_sums_are_in_replica_order_whoever_comes_first(arrival: tuple[int, ...]) -> None:
    sync, replicas = GradientSync(3), [replica(value) for value in PARTS]
    totals = [torch.tensor([value, float(n)]) for n, value in enumerate(PARTS)]

    def body(number: int) -> Callable[[], Tensor]:
        def reduce() -> Tensor:
            time.sleep(0.02 * arrival.index(number))
            return sync.reduce(number, replicas[number], totals[number])

        return reduce

    sums = together(*(body(number) for number in range(3)))
    assert [total.tolist() for total in sums] == [[0.0, 3.0]] * 3
    assert [mine.flat.tolist() for mine in replicas] == [[0.0] * 10] * 3
    assert [total.tolist() for total in totals] == [[value, float(n)] for n, value in enumerate(PARTS)]
    assert len({total.data_ptr() for total in (*sums, *totals)}) == 6, "each has sums of its own"


class Elsewhere:
    """A tensor of another device, since no second device is at hand: it cannot be added before it was moved."""

    def __init__(self, value: float) -> None:
        self.value = value

    def to(self, device: torch.device, copy: bool = False) -> Tensor:
        assert device == torch.device("cpu")
        return torch.tensor([self.value])


def test_the_sum_is_made_on_the_device_of_who_asks() -> None:
    parts: list[Any] = [Elsewhere(1.0), None, Elsewhere(2.0), Elsewhere(4.0)]
    assert gradsync._ordered_sum(parts, torch.device("cpu")).tolist() == [7.0]


def test_every_step_sums_anew() -> None:
    sync = GradientSync(2)

    def steps(number: int) -> list[tuple[float, float]]:
        mine, seen = replica(0.0), []
        for step in range(20):
            mine.flat.fill_(float(step + number))
            total = sync.reduce(number, mine, torch.tensor([float(step * number)]))
            seen.append((float(mine.flat.mean()), float(total)))
        return seen

    expected = [(2.0 * step + 1, float(step)) for step in range(20)]
    assert together(lambda: steps(0), lambda: steps(1)) == [expected, expected]


def test_nobody_overwrites_what_another_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that reads late finds the others' gradients, not their sums."""
    add = gradsync._ordered_sum

    def late(parts: Sequence[Tensor | None], device: torch.device) -> Tensor:
        if threading.current_thread().name == "replica 1":
            time.sleep(0.1)
        return add(parts, device)

    monkeypatch.setattr(gradsync, "_ordered_sum", late)
    sync, replicas = GradientSync(2), [replica(1.0), replica(2.0)]
    together(*(partial(sync.reduce, n, replicas[n], torch.zeros(1)) for n in range(2)))
    assert [mine.flat.tolist() for mine in replicas] == [[3.0] * 10] * 2


@pytest.mark.parametrize("waiting", [1, 2])
def test_abort_releases_whoever_waits_and_whoever_comes_later(waiting: int) -> None:
    sync = GradientSync(3)

    def abort() -> None:
        time.sleep(0.1)
        sync.abort()

    meets = [partial(sync.reduce, n, replica(1.0), torch.zeros(1)) for n in range(waiting)]
    *outcomes, _ = together(*meets, abort)
    with pytest.raises(StoppedError, match=r"^another replica has stopped$"):
        sync.reduce(2, replica(1.0), torch.zeros(1))
    assert [str(outcome) for outcome in outcomes] == ["another replica has stopped"] * waiting


def test_devices_are_settled_before_and_after_each_reads_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads a buffer whose stream is still at work, nor is a buffer changed while another stream reads it."""
    events: list[str] = []
    add = gradsync._ordered_sum

    def noted(parts: Sequence[Tensor | None], device: torch.device) -> Tensor:
        events.append(f"sum {device}")
        return add(parts, device)

    monkeypatch.setattr(gradsync, "settle", lambda device: events.append(f"settle {device}"))
    monkeypatch.setattr(gradsync, "_ordered_sum", noted)
    sync = GradientSync(2)
    together(*(partial(sync.reduce, n, replica(1.0), torch.zeros(1)) for n in range(2)))
    assert events[:2] == ["settle cpu"] * 2
    assert sorted(events[2:]) == ["settle cpu"] * 2 + ["sum cpu"] * 4
    assert events[-1] == "settle cpu"


def test_a_gradient_is_clipped_as_torch_does() -> None:
    for scale in (0.0, 0.1, 1.0, 7.0, 1e6):
        theirs = nn.Parameter(torch.zeros(5))
        theirs.grad = torch.arange(5.0) * scale
        mine = theirs.grad.clone()
        norm = nn.utils.clip_grad_norm_([theirs], 2.0)
        assert torch.equal(mine * clip_coefficient(norm, 2.0), theirs.grad)
    assert float(clip_coefficient(torch.tensor(1.0), 2.0)) == 1.0
    assert float(clip_coefficient(torch.tensor(8.0), 2.0)) == pytest.approx(0.25, rel=1e-6)
