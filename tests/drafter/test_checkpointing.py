"""Recomputing layers changes memory, not gradients, and is as guarded and as compiled as the forward."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import random_documents, row_source, tiny_drafter
from draftsmith.compile import guard
from draftsmith.drafter.anchors import make_blocks
from draftsmith.drafter.attention import Backend
from draftsmith.drafter.config import FULL, SLIDING
from draftsmith.drafter.loss import block_loss
from draftsmith.drafter.model import Drafter, RotaryTable
from draftsmith.pipeline.memory import Sizes, activations
from draftsmith.pipeline.topology import Topology

LAYERS = (FULL, SLIDING, FULL)


def drafter_of(checkpointing: bool, backend: Backend | None = None, **changes: Any) -> Drafter:
    made = tiny_drafter(**({"layer_types": LAYERS, "sliding_window": 3} | changes))
    return Drafter(made.config, backend or made.backend, checkpointing=checkpointing)


def loss_of(drafter: Drafter, lower: bool = False) -> Tensor:
    """The loss of one packed row, with weights and features from fixed seeds."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) * (0.3 if parameter.ndim == 2 else 1.0))
    config = drafter.config
    row = row_source(random_documents(3, [60, 64, 50]), row_tokens=256, row_anchors=128).row(0)
    blocks = make_blocks(row, block_size=config.block_size, mask_token=63, gamma=4.0)
    features = torch.randn(len(row.tokens_T), config.feature_size, generator=g)
    embedding = torch.randn(64, config.hidden_size, generator=g)
    rotary = RotaryTable(config, 256, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16, lower):
        hidden_QH = drafter(features, row.positions_T, blocks, embedding, rotary)
    return block_loss(hidden_QH, blocks, embedding, config.head_scaling).loss


def gradient(drafter: Drafter) -> Tensor:
    return torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])


def in_thread(body: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=body, name="autograd", daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("lower", [False, True], ids=["fp32", "bf16"])
def test_gradients_are_bit_equal(lower: bool) -> None:
    plain, thrifty = drafter_of(False), drafter_of(True)
    for drafter in (plain, thrifty):
        loss_of(drafter, lower).backward()
    assert sum(p.numel() for p in thrifty.parameters()) == len(gradient(thrifty))
    assert torch.equal(gradient(plain), gradient(thrifty))


def peak_bytes(body: Callable[[], object]) -> int:
    """The most that lived at one time of what `body` allocated."""
    with torch.profiler.profile(profile_memory=True) as profile:
        body()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_memory_is_saved_as_planned() -> None:
    """The plan's difference of activations against the measured difference of peaks, forward and backward."""
    shape = {"hidden_size": 64, "intermediate_size": 256, "layer_types": (FULL,) * 8}
    peaks, planned = [], []
    for checkpointing in (False, True):
        drafter = drafter_of(checkpointing, **shape)
        for parameter in drafter.parameters():
            parameter.grad = torch.zeros_like(parameter)  # as in training, where gradients are there from the start
        peaks.append(peak_bytes(lambda drafter=drafter: loss_of(drafter).backward()))
        row = row_source(random_documents(3, [60, 64, 50]), row_tokens=256, row_anchors=128).row(0)
        sizes = Sizes(
            topology=Topology(("cpu:0",), ("cpu:1",)), target_weights=1, target_layers=5, itemsize=4, mlp_width=48,
            shape=drafter.config, drafter_weights=1, matrices=((1, 1),), optimizer="adamw",
            row_tokens=len(row.tokens_T), row_anchors=len(row.anchors_N), batch_rows=1, channel_bytes=1, eval_tokens=0,
            checkpointing="layer" if checkpointing else "none",
        )  # fmt: skip
        planned.append(activations(sizes)[1])
    assert planned[1] < 0.35 * planned[0]
    assert peaks[0] - peaks[1] == pytest.approx(planned[0] - planned[1], rel=0.02)


def test_recomputation_waits_for_who_compiles() -> None:
    """It runs inside the backward, on another thread than the forward, and still does not meet a tracer."""
    drafter = drafter_of(True)
    loss, done = loss_of(drafter), threading.Event()
    with guard.exclusive("tracing"):
        thread = in_thread(lambda: (loss.backward(), done.set()))
        assert not done.wait(0.3)
        assert "autograd" not in guard.process_guard().inside()
    thread.join(10)
    assert done.is_set()


def test_backward_in_a_second_thread_while_another_compiles() -> None:
    """Many compilations meanwhile; every gradient has the bits of a quiet run."""
    drafter, results, over = drafter_of(True), [], threading.Event()
    loss_of(drafter).backward()
    quiet, before = gradient(drafter).clone(), guard.count_compilations()

    def compile_on() -> None:
        for number in range(3, 10_000):
            function = guard.compile(lambda x: (x.sin() * 2).sum(), backend="eager")
            function(torch.ones(number))
            if over.is_set():
                return

    compiler = in_thread(compile_on)
    while guard.count_compilations() < before + 4 or len(results) < 3:
        drafter.zero_grad()
        with guard.shared():
            loss = loss_of(drafter)
        thread = in_thread(loss.backward)
        thread.join(60)
        results.append(gradient(drafter).clone())
    over.set()
    compiler.join(60)
    assert not compiler.is_alive()
    assert guard.count_compilations() >= before + 4
    assert all(torch.equal(result, quiet) for result in results)


def test_recomputation_runs_compiled_code() -> None:
    """Attention through a guarded function, whose compiled code notes who calls it: twice per layer, compiled once."""
    callers: list[str] = []

    def noting(module: Any, inputs: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            callers.append(threading.current_thread().name)
            return module.forward(*args)

        return call

    def attention(q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, torch.cat([kc, kb], 1), torch.cat([vc, vb], 1))

    compiled = guard.compile(attention, backend=noting)
    backend = Backend(lambda *row: None, lambda plan, *tensors: compiled(*tensors))
    drafter = drafter_of(True, backend, num_key_value_heads=4)
    before, loss = guard.count_compilations(), loss_of(drafter)
    thread = in_thread(loss.backward)
    thread.join(10)
    assert callers == ["MainThread"] * len(LAYERS) + ["autograd"] * len(LAYERS)
    assert guard.count_compilations() == before + 1
