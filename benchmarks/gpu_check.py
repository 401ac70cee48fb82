"""The whole path on one GPU, in under five minutes: each line says what was compared and what came out.

1. compiled flex attention, forward and backward, against blockwise attention, and how long each takes; new rows and
   windows must compile nothing;
2. the same from two threads with a stream each, layers' worth of rows at a time, while a third thread compiles;
3. a drafter's logits, loss and gradient on the GPU against the CPU, fp32, and bf16 against fp32;
4. twenty pipeline steps, target and drafter on one GPU with two streams, against the same steps on the CPU; layers
   computed twice against layers kept; nothing may compile after the warm-up;
5. throughput of target and pipeline, and peak memory;
6. greedy decoding: identical to plain decoding (fp32), or differing only at ties (bf16).

    python benchmarks/gpu_check.py [--json F]       exit code 1 if a comparison fails
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith import embedded
from draftsmith.compile import guard
from draftsmith.compile.warmup import Signature, warm_up
from draftsmith.config import Config, load_config
from draftsmith.data.packing import RowSource
from draftsmith.decode.evaluate import evaluate
from draftsmith.drafter.anchors import make_blocks
from draftsmith.drafter.attention import BLOCKWISE, Backend, BlockLayout
from draftsmith.drafter.attention.flex import flex_backend
from draftsmith.drafter.loss import block_loss
from draftsmith.drafter.model import Drafter, RotaryTable
from draftsmith.nouns import Row
from draftsmith.pipeline.prepare import Job, prepare
from draftsmith.pipeline.trainer import Run, execute
from draftsmith.pipeline.transfer import blocks_to, worker_stream
from draftsmith.pipeline.warmup import run_signatures, warm_up_and_log

STEPS = 20
GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
TOKENS, ANCHORS, SIZE, HEADS, KV_HEADS, DIM = 3072, 512, 16, 32, 8, 128  # attention of a drafter for Qwen3-8B


class Report:
    """Collects comparisons and prints them as they come."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []

    def compare(self, name: str, value: float, limit: float) -> None:
        self.results[name] = value
        if not value <= limit:
            self.failed.append(name)
        print(f"{'ok  ' if value <= limit else 'FAIL'} {name}: {value:.3g} (limit {limit:g})")

    def note(self, name: str, value: float, unit: str) -> None:
        self.results[name] = value
        print(f"     {name}: {value:,.1f} {unit}")


def config_for(device: str, folder: str, *settings: str) -> Config:
    overrides = [f"run.dir={folder}", f"device={device}", "topology=1+1", f"train.steps={STEPS}", "eval.every=0"]
    return load_config(embedded.CONFIG, [*overrides, "checkpoint.every=0", *settings])


def random_layout(seed: int) -> tuple[BlockLayout, int]:
    """A row of one to four documents, nearly full, and its length; every other one for a sliding layer."""
    r = random.Random(seed)
    count = r.randint(1, 4)
    length, anchors, starts = r.randint(TOKENS // 2, TOKENS) // count, [], []
    for document in range(count):
        picked = sorted(r.sample(range(1, length), min(length - 1, ANCHORS // count)))
        anchors += [document * length + anchor for anchor in picked]
        starts += [document * length] * len(picked)
    return BlockLayout(
        tuple(anchors), tuple(starts), SIZE, r.choice([8, 64, 1024]) if seed % 2 else None
    ), length * count


def attention_of(backend: Backend, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of queries, keys and values for one row on the GPU."""
    layout, tokens = random_layout(seed)
    slots, g = len(layout.anchors) * SIZE, torch.Generator().manual_seed(seed)
    shapes = [(HEADS, slots), *[(KV_HEADS, tokens)] * 2, *[(KV_HEADS, slots)] * 2]
    inputs = [torch.randn(h, n, DIM, generator=g).to(GPU, dtype).requires_grad_() for h, n in shapes]
    upstream = torch.randn(HEADS, slots, DIM, generator=g).to(GPU, dtype)
    out = backend.attend(backend.plan(layout, HEADS // KV_HEADS, dtype, GPU), *inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference, each tensor relative to its own norm."""
    return max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, expected, strict=True))


def check_flex(report: Report) -> Backend:
    """Flex attention against blockwise, and its one compilation per dtype."""
    backend = flex_backend(TOKENS, ANCHORS)
    for dtype, limit in ((torch.bfloat16, 0.02), (torch.float32, 1e-3)):
        name = str(dtype).removeprefix("torch.")
        (warmed,) = warm_up([Signature(name, partial(attention_of, backend, 0, dtype))])
        report.note(f"compiling flex attention, {name}, cache {warmed.cache}", warmed.seconds, "s")
        compiled = guard.count_compilations()
        differences = [worst(attention_of(backend, s, dtype), attention_of(BLOCKWISE, s, dtype)) for s in range(8)]
        report.compare(f"flex against blockwise attention, {name} (relative)", max(differences), limit)
        report.compare(f"compilations for new rows and windows, {name}", guard.count_compilations() - compiled, 0)
    for title, one in (("flex", backend), ("blockwise", BLOCKWISE)):
        attention_of(one, 0, torch.bfloat16)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for seed in range(4):
            attention_of(one, seed, torch.bfloat16)
        torch.cuda.synchronize()
        report.note(f"{title} attention, forward and backward of a row", 250 * (time.perf_counter() - began), "ms")
    return backend


def check_threads(report: Report, backend: Backend) -> None:
    """Two threads attend on streams of their own while a third compiles: right results, and only the third compiles."""
    expected = {seed: attention_of(backend, seed, torch.bfloat16) for seed in range(4)}
    torch.cuda.synchronize()
    before = guard.count_compilations()

    def attend() -> float:
        with worker_stream(GPU):
            found = [worst(attention_of(backend, s % 4, torch.bfloat16), expected[s % 4]) for s in range(24)]
        return max(found)

    def compile_on() -> None:
        for number in range(6):
            scaled = guard.compile(lambda x: (x * 2).relu().sum())
            scaled(torch.ones(number + 2, 64, device=GPU, requires_grad=True)).backward()

    with ThreadPoolExecutor(3) as pool:
        compiler, *callers = pool.submit(compile_on), pool.submit(attend), pool.submit(attend)
        compiler.result()
        difference = max(caller.result() for caller in callers)
    report.compare("attention of two threads beside a compiler, against alone (relative)", difference, 1e-3)
    report.compare("compilations but the third thread's", guard.count_compilations() - before - 6, 0)


def gradient_of(job: Job, row: Row, hidden_TF: Tensor, device: torch.device, lower: bool) -> tuple[Tensor, float]:
    """Flat gradient and loss of one row on a device, on the CPU afterwards."""
    drafter = Drafter(job.drafter.config)  # blockwise attention, which both devices have
    drafter.load_state_dict(job.drafter.state_dict())
    drafter.to(device)
    size, mask = drafter.config.block_size, drafter.config.mask_token_id
    blocks = blocks_to(make_blocks(row, block_size=size, mask_token=mask, gamma=job.gamma), device)
    rotary = RotaryTable(drafter.config, 4096, device)
    embedding, head = (w.detach().to(device, torch.float32) for w in (job.target.embedding_VH, job.target.head_VH))
    with torch.autocast(device.type, torch.bfloat16, enabled=lower):
        hidden = drafter(hidden_TF.to(device), row.positions_T.to(device), blocks, embedding, rotary)
    loss = block_loss(hidden, blocks, head, drafter.config.head_scaling)
    loss.loss.backward()
    flat = torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])
    return flat.float().cpu(), float(loss.loss / loss.weight)


def check_drafter(report: Report, job: Job, source: RowSource) -> None:
    row = source.row(0)
    hidden_TF = torch.cat(job.target.features([row.tokens_T[s.start : s.stop] for s in row.spans])).float().cpu()
    exact, loss = gradient_of(job, row, hidden_TF, CPU, lower=False)
    on_gpu, gpu_loss = gradient_of(job, row, hidden_TF, GPU, lower=False)
    rough, _ = gradient_of(job, row, hidden_TF, GPU, lower=True)
    report.compare("loss, GPU against CPU, fp32 (relative)", abs(gpu_loss - loss) / loss, 1e-4)
    report.compare("gradient, GPU against CPU, fp32 (relative)", float((on_gpu - exact).norm() / exact.norm()), 1e-3)
    report.compare("gradient, bf16 against fp32 (relative)", float((rough - exact).norm() / exact.norm()), 0.1)


class _Losses:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.compiled = 0

    def step(self, record: Any, tau: float | None) -> None:
        self.losses.append(record.loss)
        self.rates.append(record.tokens_per_s)
        self.compiled = record.compiles_after_warmup

    def log(self, line: str) -> None:
        pass


def train_on(device: str, folder: str, *settings: str) -> tuple[_Losses, Job, Run]:
    config = config_for(device, folder, *settings)
    job, losses, runs = prepare(config), _Losses(), []

    def listener(run: Run) -> _Losses:
        runs.append(run)
        return losses

    Path(folder).mkdir(parents=True, exist_ok=True)
    warm_up_and_log(run_signatures(job.drafter.backend, job.drafter.config, job.topology), print)
    execute(job, Path(folder), None, threading.Event(), listener)
    return losses, job, runs[0]


def check_pipeline(report: Report, folder: str) -> tuple[Job, Run]:
    torch.cuda.reset_peak_memory_stats(GPU)
    gpu, job, run = train_on("cuda", f"{folder}/gpu")
    peak_mib = torch.cuda.max_memory_allocated(GPU) / 2**20
    cpu, _, _ = train_on("cpu", f"{folder}/cpu")
    torch.cuda.reset_peak_memory_stats(GPU)
    thrifty, _, _ = train_on("cuda", f"{folder}/thrifty", "drafter.checkpointing=layer")
    thrifty_mib = torch.cuda.max_memory_allocated(GPU) / 2**20

    def apart(one: _Losses, other: _Losses) -> float:
        return max(abs(a - b) / b for a, b in zip(one.losses, other.losses, strict=True))

    report.compare(f"losses of {STEPS} steps, GPU (bf16) against CPU (fp32) (relative)", apart(gpu, cpu), 0.05)
    report.compare("losses, layers computed twice against kept (relative)", apart(thrifty, gpu), 0.01)
    report.compare("compilations after the warm-up", gpu.compiled + thrifty.compiled, 0)
    report.note("peak GPU memory, layers computed twice", thrifty_mib, "MiB")
    report.note("pipeline on one GPU, last ten steps", sum(gpu.rates[-10:]) / 10, "tokens/s")
    report.note("peak GPU memory", peak_mib, "MiB")
    return job, run


def check_target_speed(report: Report, job: Job) -> None:
    rows = [job.source.row(index) for index in range(40)]
    documents = [row.tokens_T[s.start : s.stop] for row in rows for s in row.spans]
    job.target.features(documents[:8])
    torch.cuda.synchronize()
    began = time.perf_counter()
    job.target.features(documents)
    torch.cuda.synchronize()
    report.note("target alone", sum(map(len, documents)) / (time.perf_counter() - began), "tokens/s")


def check_decoding(report: Report, job: Job, run: Run) -> None:
    drafter = next(iter(run.drafters.values())).drafter.eval()
    result = evaluate(job.target, drafter, job.prompts[:10], 96)
    report.compare("prompts that differ from plain decoding other than at ties", float(not result.main.lossless), 0)
    report.note("τ after a few steps", result.main.tau, "tokens per round")
    report.note("speed-up over plain decoding", result.main.speedup, "x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: this PyTorch sees no CUDA device; nothing was checked", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name(GPU)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    report = Report()
    check_threads(report, check_flex(report))
    with tempfile.TemporaryDirectory() as folder:
        job = prepare(config_for("cuda", f"{folder}/first"))
        check_drafter(report, job, job.source)
        job, run = check_pipeline(report, folder)
        check_target_speed(report, job)
        check_decoding(report, job, run)
    if options.json:
        options.json.write_text(json.dumps(report.results, indent=2) + "\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
