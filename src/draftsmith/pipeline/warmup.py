"""What a run compiles: one attention signature per drafter device, or nothing at all with blockwise attention."""

from collections.abc import Callable
from functools import partial

import torch

from draftsmith.compile.warmup import Signature, Warmed, warm_up
from draftsmith.config import Config
from draftsmith.decisions import Ledger
from draftsmith.drafter.attention import Backend, BlockLayout
from draftsmith.drafter.config import DrafterConfig
from draftsmith.pipeline.machine import this_machine
from draftsmith.pipeline.prepare import choose_attention, choose_shape, make_backend, outline
from draftsmith.pipeline.topology import Topology, device_of
from draftsmith.pipeline.transfer import worker_stream
from draftsmith.pipeline.workers import autocast

NOTHING = "warm-up: nothing to compile, the run uses no compiler"


def planned_signatures(config: Config, decide: Ledger) -> tuple[Signature, ...]:
    """The signatures of a run, from configs alone: no weights, no tokenizer, no data.

    Raises:
        InputError, ConfigError: something that training would refuse too.
    """
    known = outline(config, this_machine(), decide)
    shape = choose_shape(config, known.target_config, known.taps, 0, known.target_config.vocab_size)
    attention: str = decide(choose_attention(config, known.topology, shape.head_dim))
    return run_signatures(make_backend(config, attention), shape, known.topology)


def run_signatures(backend: Backend, shape: DrafterConfig, topology: Topology) -> tuple[Signature, ...]:
    """The signatures of a run whose drafters have this shape and backend."""
    if not backend.compiles:
        return ()
    heads = f"{shape.num_attention_heads} heads of {shape.head_dim}, {shape.num_key_value_heads} for keys"
    devices = {str(device_of(name)): device_of(name) for name in topology.drafter}
    return tuple(
        Signature(f"{name}: attention, forward and backward, {heads}", partial(attend_once, backend, shape, device))
        for name, device in devices.items()
    )


def attend_once(backend: Backend, shape: DrafterConfig, device: torch.device) -> None:
    """Attention of the smallest row, as a drafter worker calls it; the backend pads it to the signature of all rows."""
    layout, dim = BlockLayout((1,), (0,), shape.block_size, None), shape.head_dim
    groups = shape.num_attention_heads // shape.num_key_value_heads
    with worker_stream(device):
        with autocast(device) as lower:
            dtype = torch.bfloat16 if lower else torch.float32

            def some(heads: int, length: int) -> torch.Tensor:
                return torch.ones(heads, length, dim, dtype=dtype, device=device, requires_grad=True)

            q = some(shape.num_attention_heads, shape.block_size)
            kc, vc, kb, vb = (some(shape.num_key_value_heads, length) for length in (2, 2, *[shape.block_size] * 2))
            out = backend.attend(backend.plan(layout, groups, dtype, device), q, kc, vc, kb, vb)
        out.sum().backward()  # type: ignore[no-untyped-call]


def warm_up_and_log(signatures: tuple[Signature, ...], log: Callable[[str], None]) -> None:
    """Compiles all, a line for each."""

    def done(result: Warmed) -> None:
        log(f"warm-up: {result.name}: {result.seconds:.1f} s, cache {result.cache}")

    if not warm_up(signatures, done):
        log(NOTHING)
