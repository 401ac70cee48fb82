"""`draftsmith demo`: the whole job on the embedded target, from target weights to measured figures."""

import json
import shutil
import statistics
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from draftsmith import embedded
from draftsmith.config import load_config
from draftsmith.data.conversations import read_prompts
from draftsmith.data.template import Renderer
from draftsmith.decisions import Decision
from draftsmith.decode.evaluate import decoded_tau
from draftsmith.decode.methods import Chain
from draftsmith.errors import ConfigError
from draftsmith.nouns import StepRecord
from draftsmith.pipeline.prepare import Job, prepare
from draftsmith.pipeline.trainer import execute
from draftsmith.report.console import console, say
from draftsmith.report.decoding import evaluate_with_status
from draftsmith.report.session import load_pair, print_launch_lines, train_and_show
from draftsmith.report.table import eval_table
from draftsmith.target.load import TargetSpec

WARMUP_STEPS, UNTIMED_STEPS = 40, 10
EVALUATIONS = 4  # while training


def run_demo(minutes: float, out: Path | None, stop: threading.Event) -> None:
    """Trains for about `minutes`, evaluates the reloaded `draft/`, writes `eval.json` and prints the table."""
    folder = out or _free_folder()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder} is not an empty directory; choose another")
    say(
        f"demo: trains for {minutes:g} minutes; preparing, measuring τ along the way and the final comparison take a "
        f"few more. Everything goes to {folder}"
    )
    config = load_config(embedded.CONFIG, [f"run.dir={json.dumps(str(folder))}"])
    job = prepare(config)
    step_s = timed_step(job)
    steps = EVALUATIONS * max(1, round(60 * minutes / step_s / EVALUATIONS))
    say(f"a step takes {step_s:.2f} s on this machine: {steps} steps in {minutes:g} minutes")
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"steps": steps}),
            "eval": config.eval.model_copy(update={"every": steps // EVALUATIONS}),
        }
    )
    fitted = Decision("steps", steps, f"what fits into {minutes:g} minutes at {step_s:.3f} s a step")
    kept = tuple(decision for decision in job.decisions if decision.name != fitted.name)
    job = replace(job, config=config, steps=steps, decisions=(*kept, fitted))
    say(f"decoding {len(job.prompts)} held-out prompts with the untrained drafter")
    tau_before = decoded_tau(job.target, job.drafter.eval(), job.prompts, config.eval.max_new_tokens)
    say(f"τ of the drafter as initialised: {tau_before:.3f}")

    result = train_and_show(config, resume=False, stop=stop, job=job)
    if not result.finished:
        return
    shutil.copytree(embedded.TARGET, folder / "target")
    held_out = read_prompts(["demo"])[: config.eval.limit]
    (folder / "prompts.jsonl").write_text("".join(prompt.to_json() + "\n" for prompt in held_out), encoding="utf-8")
    target, drafter = load_pair(TargetSpec(str(folder / "target")), folder / "draft", job.target.device)
    renderer = Renderer(target.tokenizer)
    prompts = [renderer.prompt_ids(prompt) for prompt in read_prompts([str(folder / "prompts.jsonl")])]
    report = evaluate_with_status(target, Chain(drafter), prompts, config.eval.max_new_tokens)
    steps_taken = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figures = report.to_json() | {
        "tau_before": tau_before,
        "train_seconds": sum(step["step_s"] for step in steps_taken),
        "train_tokens": sum(step["tokens"] for step in steps_taken),
    }
    (folder / "eval.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.print(eval_table(report, tau_before))
    print_launch_lines(str(folder / "target"), folder / "draft")


class _Timer:
    """A listener that keeps the seconds of the steps."""

    def __init__(self) -> None:
        self.step_s: list[float] = []

    def step(self, record: StepRecord, tau: float | None) -> None:
        self.step_s.append(record.step_s)

    def log(self, line: str) -> None:
        pass


def timed_step(job: Job) -> float:
    """Median seconds of a step, from a short run of the same pipeline that is thrown away."""
    timer = _Timer()
    config = job.config.model_copy(update={"eval": job.config.eval.model_copy(update={"every": 0})})
    trial = replace(job, config=config, steps=WARMUP_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        execute(trial, Path(folder), None, threading.Event(), lambda run: timer)
    return statistics.median(timer.step_s[UNTIMED_STEPS:])


def _free_folder() -> Path:
    number = 1
    while (folder := Path("runs") / ("demo" if number == 1 else f"demo-{number}")).exists():
        number += 1
    return folder
