"""Checks of a run: its target's and drafter's code, its signatures, its memory, and a short training under the hunt."""

import tempfile
import threading
from pathlib import Path
from typing import Any

import draftsmith.drafter
from draftsmith.compile import guard, hunt, private
from draftsmith.config import Config
from draftsmith.decisions import Ledger
from draftsmith.doctor.check import NEEDS_CONFIG, Check, Subject
from draftsmith.doctor.code import compiling_calls, reentrant_calls, sources
from draftsmith.errors import InputError
from draftsmith.pipeline.machine import GIB
from draftsmith.pipeline.memory import place_of
from draftsmith.pipeline.prepare import choose_attention, make_backend, packing_settings
from draftsmith.pipeline.trainer import train
from draftsmith.pipeline.warmup import run_signatures

HUNT_STEPS = 6
SCORE_COPIES = 3  # dense flex attention holds scores, weights and a temporary in fp32: 1,684 MiB measured for 512


def target_code(subject: Subject) -> Check:
    """Does the target compile, trace or call flex attention on its own, where the guard cannot see it?"""
    name = "target's code"
    if subject.config is None:
        return Check(name, "skipped", NEEDS_CONFIG)
    files = sources(subject.skeleton)
    written = compiling_calls(files)
    seen, how = subject.called
    called = [f"{what} {times} times" for what, times in seen.items() if what != "re-entrant checkpointing"]
    read = f"{len(files)} source files ({', '.join(path.name for path in files)})"
    text = f"{read}: {'; '.join(written) or 'no call that compiles or traces'}; {how}: {'; '.join(called) or 'none'}"
    if called:
        remedy = "use a target, or a setting of it, with eager or sdpa attention and without torch.compile"
        return Check(name, "fail", text, remedy)
    if written:
        return Check(name, "warn", text, "see that your rows do not reach these lines, or wrap them in the guard")
    return Check(name, "ok", text)


def checkpointing(subject: Subject) -> Check:
    """Is activation checkpointing re-entrant anywhere? Its recomputation runs a backward inside the backward."""
    name = "re-entrant checkpointing"
    if subject.config is None:
        return Check(name, "skipped", NEEDS_CONFIG)
    folder = Path(next(iter(draftsmith.drafter.__path__)))
    ours = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    in_drafter, in_target = reentrant_calls(ours), reentrant_calls(sources(subject.skeleton))
    active = any(getattr(module, "gradient_checkpointing", False) for module in subject.skeleton.modules())
    seen, how = subject.called
    evidence = (
        f"drafter, {len(ours)} files: {'; '.join(in_drafter) or 'none'}; target: {'; '.join(in_target) or 'none'}, "
        f"switched {'on' if active else 'off'}; {how}: {seen['re-entrant checkpointing']} times"
    )
    if in_drafter or seen["re-entrant checkpointing"]:
        return Check(name, "fail", evidence, "pass use_reentrant=False to torch.utils.checkpoint.checkpoint")
    if in_target or active:
        return Check(name, "warn", evidence, "none in draftsmith: the target is never trained; elsewhere as above")
    return Check(name, "ok", evidence)


def recompile_limit(subject: Subject) -> Check:
    """Do the run's devices and shapes have more signatures than the compiler keeps?"""
    name = "recompile limit"
    if subject.config is None:
        return Check(name, "skipped", NEEDS_CONFIG)
    topology = subject.outline.topology
    attention: str = Ledger()(choose_attention(subject.config, topology, subject.shape.head_dim))
    signatures = len(run_signatures(make_backend(subject.config, attention), subject.shape, topology))
    limit = private.recompile_limit()
    evidence = (
        f"{attention} attention on {len(set(topology.drafter))} drafter devices has {signatures} signatures; PyTorch's "
        f"limit {limit}, the guard's {guard.RECOMPILE_LIMIT}"
    )
    if signatures > guard.RECOMPILE_LIMIT:
        return Check(name, "fail", evidence, "use fewer devices in one process")
    if signatures > limit:
        return Check(name, "warn", f"{evidence}; beyond its own limit PyTorch runs dense in silence", GUARDED_LIMIT)
    return Check(name, "ok", evidence)


GUARDED_LIMIT = "none in draftsmith: guarded functions have a limit each, and raise at it"


def dense_memory(subject: Subject) -> Check:
    """What would a step need if flex attention fell back to dense, beside everything else?"""
    name = "memory of a dense fallback"
    if subject.config is None:
        return Check(name, "skipped", NEEDS_CONFIG)
    shape, packing = subject.shape, packing_settings(subject.config)
    queries = packing.row_anchors * shape.block_size
    keys = packing.row_tokens + queries
    scores = shape.num_attention_heads * queries * keys * 4
    need = scores * (SCORE_COPIES + len(shape.layer_types) - 1)  # one is kept per layer for the backward
    place = place_of(subject.outline.topology.drafter[0])
    has = subject.machine.capacity(place)
    evidence = (
        f"{shape.num_attention_heads} heads x {queries} slots x {keys} keys x 4 bytes = {scores / GIB:.2f} GiB per "
        f"copy, {need / GIB:.2f} GiB for {len(shape.layer_types)} layers, beside the run; {place} has {has / GIB:.1f}"
    )
    if need > has:
        remedy = "none in draftsmith: a dense run is refused, never silent"
        return Check(name, "warn", f"{evidence}: a fallback would exhaust it", remedy)
    return Check(name, "ok", f"{evidence}: a fallback would be slow, not fatal")


def hunted_run(subject: Subject) -> Check:
    """A short training of the config, with who traces and who meets it on record."""
    name = "hunt"
    if subject.config is None or not subject.hunt:
        return Check(name, "skipped", "needs --hunt and a CONFIG: trains a few steps of it and watches")
    recorder = hunt.install()
    try:
        steps = _train_briefly(subject.config)
        evidence = f"{steps} steps of training; {recorder.report()}"
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - meetings end like this
        evidence = f"the training failed: {type(error).__name__}: {error}; {recorder.report()}"
        return Check(name, "fail", evidence, MET if recorder.meetings else "read the error; no thread met a trace")
    finally:
        recorder.uninstall()
    if recorder.meetings or hunt.stuck():
        return Check(name, "fail", evidence, MET)
    return Check(
        name, "ok", f"{evidence}: no thread met another's trace; recording took {recorder.cost_s * 1e3:.1f} ms"
    )


MET = "something traces outside the guard: wrap what stands on the left in guard.exclusive()"


def _train_briefly(config: Config) -> int:
    """Trains into a folder that is deleted. Returns the steps."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-hunt-") as folder:
        changes = {
            "run": {"dir": f"{folder}/run"},
            "train": {"steps": HUNT_STEPS},
            "eval": {"every": 0},
            "checkpoint": {"every": 0},
            "report": {"tensorboard": False},
        }
        sections = {key: getattr(config, key).model_copy(update=values) for key, values in changes.items()}
        return train(
            config.model_copy(update=sections),
            resume=False,
            stop=threading.Event(),
            listener=lambda run: Silent(),
            log=lambda line: None,
        ).step


class Silent:
    """A listener that nobody listens to."""

    def step(self, record: Any, tau: float | None) -> None:
        pass

    def log(self, line: str) -> None:
        pass
