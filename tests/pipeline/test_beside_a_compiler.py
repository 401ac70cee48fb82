"""Training beside a thread that compiles all the time gives the same bits: features, gradients and updates are true."""

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from conftest import demo_shape, run_training
from draftsmith.compile import guard
from draftsmith.config import Config
from draftsmith.decode.evaluate import library_generate
from draftsmith.decode.speculate import plain_generate, speculative_generate
from draftsmith.drafter.init import random_init
from draftsmith.drafter.model import Drafter
from draftsmith.target.load import Target


def test_training_beside_a_thread_that_compiles(demo_config: Callable[..., Config], tmp_path: Path) -> None:
    """The other thread has never heard of the guard. Without it, optimizers take another path while it compiles."""
    quiet, _, _ = run_training(demo_config(run__dir=str(tmp_path / "quiet"), pipeline__threads=1))
    done, compiled = threading.Event(), 0

    def compile_all_the_time() -> None:
        nonlocal compiled
        function = torch.compile(lambda x: (x.sin() * 2).cos().sum(), backend="aot_eager", dynamic=False)
        with torch._dynamo.config.patch(recompile_limit=10**6, accumulated_recompile_limit=10**6):
            while not done.is_set():
                compiled += 1
                function(torch.ones(2 + compiled, 3))

    guard.install()
    compiler = threading.Thread(target=compile_all_the_time, daemon=True)
    compiler.start()
    try:
        loud, _, _ = run_training(demo_config(run__dir=str(tmp_path / "loud"), pipeline__threads=1))
    finally:
        done.set()
        compiler.join(30)
    assert compiled >= 20
    ours, theirs = (load_file(r.folder / "draft" / "model.safetensors") for r in (quiet, loud))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_eager_forward_is_inside_the_guard(demo_target: Target) -> None:
    """Since torch 2.13 an eager model takes another thread's compilation for its own; features then differ silently."""
    drafter, inside = Drafter(demo_shape(demo_target)), list[list[str]]()
    random_init(drafter, 0)
    watch = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda *_: inside.append(guard.process_guard().inside())
    )
    try:
        demo_target.features([torch.arange(5)])
        speculative_generate(demo_target, drafter, [1, 2, 3], 8)
        plain_generate(demo_target, [1, 2, 3], 4)
        library_generate(demo_target, [1, 2, 3], 4)
    finally:
        watch.remove()
    assert len(inside) > 100
    assert {tuple(names) for names in inside} == {(threading.current_thread().name,)}
