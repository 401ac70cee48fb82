"""A whole drafter step (forward, loss, backward) with blockwise attention against the same step with a dense mask.

The dense twin is the same model with the same weights and the same chunked loss; its one boolean mask is built outside
the timer and keys are not repeated (`enable_gqa`). The two alternate; times are medians. Peak memory is measured in a
process of its own per variant, above what the process held before the step. FLOPs count linear layers 6 per weight and
token (the frozen head 4), attention 3.5 times its forward over visible pairs only, and no recomputation.

    python benchmarks/attention.py [--json F] [--long | --recompute]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafter.anchors import make_blocks
from draftsmith.drafter.attention import BLOCKWISE, Backend, BlockLayout
from draftsmith.drafter.attention.layout import block_mask, context_mask
from draftsmith.drafter.config import FULL, DrafterConfig
from draftsmith.drafter.init import random_init
from draftsmith.drafter.loss import block_loss
from draftsmith.drafter.model import Drafter, RotaryTable
from draftsmith.nouns import Blocks, Row, Span

SHAPES = [(2048, 256), (3072, 512)]
LONG_SHAPES = [(2048, 256), (4096, 512), (8192, 1024), (16384, 2048), (32768, 4096)]
THREADS, REPEATS = 2, 5


def dense_backend(mask: Tensor) -> Backend:
    """Everything in one call under one boolean mask [Q, T + Q]."""

    def attend(plan: Tensor, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        k, v = torch.cat([kc, kb], 1)[None], torch.cat([vc, vb], 1)[None]
        return F.scaled_dot_product_attention(q[None], k, v, attn_mask=plan, enable_gqa=True)[0]

    return Backend(lambda layout, groups, dtype, device: mask, attend)


@dataclass(frozen=True, eq=False)
class Case:
    """One row of one document, with random anchors and features."""

    config: DrafterConfig
    row: Row
    blocks: Blocks
    features_TF: Tensor
    embedding_VH: Tensor
    rotary: RotaryTable

    def drafter(self, backend: Backend, *, checkpointing: bool = False) -> Drafter:
        drafter = Drafter(self.config, backend, checkpointing=checkpointing)
        random_init(drafter, 0)
        return drafter

    def dense_mask(self) -> Tensor:
        layout = BlockLayout(self.blocks.anchors, self.blocks.starts, self.config.block_size, None)
        every, device = slice(0, len(self.blocks.anchors)), torch.device("cpu")
        context = context_mask(layout, every, slice(0, len(self.row.tokens_T)), device)
        context = context.expand(-1, self.config.block_size, -1).flatten(0, 1)
        return torch.cat([context, block_mask(layout, len(self.blocks.anchors), device)], 1)

    def step(self, drafter: Drafter) -> float:
        """Seconds of one step."""
        drafter.zero_grad()
        began = time.perf_counter()
        hidden_QH = drafter(self.features_TF, self.row.positions_T, self.blocks, self.embedding_VH, self.rotary)
        block_loss(hidden_QH, self.blocks, self.embedding_VH, self.config.head_scaling).loss.backward()
        return time.perf_counter() - began

    def flops(self) -> float:
        """Floating-point operations of a step, by the rules above."""
        c, tokens, slots = self.config, len(self.row.tokens_T), self.blocks.tokens_NB.numel()
        kv = 2 * c.hidden_size * c.num_key_value_heads * c.head_dim
        per_slot = kv + 2 * c.hidden_size * c.num_attention_heads * c.head_dim + 3 * c.hidden_size * c.intermediate_size
        context = c.feature_size * c.hidden_size + len(c.layer_types) * kv
        pairs = sum(anchor + c.block_size for anchor in self.blocks.anchors) * c.block_size
        attention = 3.5 * 4 * pairs * c.num_attention_heads * c.head_dim * len(c.layer_types)
        head = 4 * len(self.blocks.labels_L) * c.vocab_size * c.hidden_size
        return 6.0 * (slots * per_slot * len(c.layer_types) + tokens * context) + head + attention


def make_case(tokens: int, anchors: int, layers: int = 2) -> Case:
    random = torch.Generator().manual_seed(0)
    config = DrafterConfig(
        hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        vocab_size=4096, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=40960, attention_bias=False, layer_types=(FULL,) * layers, sliding_window=None,
        block_size=16, target_layer_ids=(1, 2, 3, 4, 5), num_target_layers=8, mask_token_id=0,
    )  # fmt: skip
    picked = 1 + torch.randperm(tokens - 17, generator=random)[:anchors].sort().values
    row = Row(
        index=0,
        spans=(Span(0, 0, tokens),),
        tokens_T=torch.randint(0, 4096, (tokens,), generator=random),
        positions_T=torch.arange(tokens),
        supervised_T=torch.ones(tokens, dtype=torch.bool),
        anchors_N=picked,
        starts_N=torch.zeros_like(picked),
    )
    return Case(
        config=config,
        row=row,
        blocks=make_blocks(row, block_size=16, mask_token=0, gamma=7.0),
        features_TF=torch.randn(tokens, config.feature_size, generator=random),
        embedding_VH=torch.randn(4096, 256, generator=random) * 0.2,  # logits of a trained model's spread, about 3
        rotary=RotaryTable(config, tokens + 16, torch.device("cpu")),
    )


def measure(tokens: int, anchors: int) -> dict[str, Any]:
    """One line of the table."""
    case = make_case(tokens, anchors)
    ours, dense = case.drafter(BLOCKWISE), case.drafter(dense_backend(case.dense_mask()))
    case.step(ours), case.step(dense)
    times = [(case.step(ours), case.step(dense), gemm_gflops()) for _ in range(REPEATS)]
    step_s, dense_step_s, peak = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "rows": tokens,
        "anchors": anchors,
        "step_s": step_s,
        "dense_step_s": dense_step_s,
        "peak_mib": peak_memory(tokens, anchors, "blockwise"),
        "dense_peak_mib": peak_memory(tokens, anchors, "dense"),
        "flops": case.flops(),
        "peak_gflops": peak,
        "gemm_share": case.flops() / step_s / 1e9 / peak,
    }


def measure_recomputation() -> None:
    """Five layers with and without `drafter.checkpointing: layer`."""
    tokens, anchors = SHAPES[0]
    case = make_case(tokens, anchors, 5)
    plain, thrifty = (case.drafter(BLOCKWISE, checkpointing=layer) for layer in (False, True))
    case.step(plain), case.step(thrifty)
    times = [(case.step(plain), case.step(thrifty)) for _ in range(REPEATS)]
    for name, step_s in zip(("none", "layer"), map(statistics.median, zip(*times, strict=True)), strict=True):
        print(f"checkpointing {name}: {step_s:.2f} s, peak {peak_memory(tokens, anchors, name):.0f} MiB")


def gemm_gflops(size: int = 2048) -> float:
    """The machine's fp32 matrix product, now."""
    a = torch.randn(size, size)
    began = time.perf_counter()
    for _ in range(3):
        a @ a
    return 3 * 2 * size**3 / (time.perf_counter() - began) / 1e9


def peak_memory(tokens: int, anchors: int, variant: str) -> float:
    """MiB above the start of the step, in a fresh process."""
    command = [sys.executable, __file__, "--memory", variant, str(tokens), str(anchors)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def step_memory(variant: str, tokens: int, anchors: int) -> float:
    """Runs one step and returns its peak, from the kernel's own high-water mark (Linux)."""
    case = make_case(tokens, anchors, 5 if variant in ("none", "layer") else 2)
    backend = dense_backend(case.dense_mask()) if variant == "dense" else BLOCKWISE
    drafter = case.drafter(backend, checkpointing=variant == "layer")
    case.rotary.at(case.row.positions_T)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    case.step(drafter)
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--long", action="store_true", help="memory of rows up to 32 K tokens, blockwise only")
    parser.add_argument("--recompute", action="store_true", help="time and memory of five layers, each computed twice")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.memory:
        variant, tokens, anchors = options.memory
        print(step_memory(variant, int(tokens), int(anchors)))
        return
    if options.recompute:
        measure_recomputation()
        return
    if options.long:
        for tokens, anchors in LONG_SHAPES:
            print(f"{tokens:6} tokens {anchors:5} anchors: {peak_memory(tokens, anchors, 'blockwise'):6.0f} MiB")
        return
    results = []
    for tokens, anchors in SHAPES:
        result = measure(tokens, anchors)
        results.append(result)
        print(
            f"{tokens} tokens, {anchors} anchors: {result['step_s']:.2f} s, dense {result['dense_step_s']:.2f} s "
            f"({result['dense_step_s'] / result['step_s']:.2f}x), peak {result['peak_mib']:.0f} of "
            f"{result['dense_peak_mib']:.0f} MiB ({result['peak_mib'] / result['dense_peak_mib']:.2f}), "
            f"{result['gemm_share']:.0%} of {result['peak_gflops']:.0f} GFLOP/s"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
