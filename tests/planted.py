"""Runs in a process of their own, with a fault planted by real means. `start` runs a body that has `config` and these
helpers at hand and must call `go(plant)`."""

import os
import subprocess
import sys
from pathlib import Path

from draftsmith.config import Config, dump_config

# For `start`: every block is asked of the kernel, none is made of memory that was free.
FRESH_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "32768",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TOP_PAD_": "0",
}
PRELUDE = """
import ctypes, os, resource, sys, threading, time
import torch
from pathlib import Path
from draftsmith import cli
from draftsmith.config import load_config
from draftsmith.pipeline import trainer
from draftsmith.target.capture import decoder_layers

config = Path({config!r})


def no_more_memory():
    \"\"\"From now on the kernel refuses this process any more memory.\"\"\"
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() - 64 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def memory_again_with_the_next_line(run):
    log = run.journal.log

    def again(line):
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log(line)

    run.journal.log = again


def wait_for_targets():
    for thread in threading.enumerate():
        if thread.name.startswith("target"):
            thread.join()


def target_layer(run):
    target = run.job.target
    return decoder_layers(target.model, target.config.num_hidden_layers)[1]


def first_drafter(run):
    return next(iter(run.drafters.values())).drafter


def go(plant, *more):
    \"\"\"`draftsmith train config`, with `plant(run)` called before the workers start.\"\"\"
    run = trainer.Run.run

    def planted(self, on_failure):
        plant(self)
        run(self, on_failure)

    trainer.Run.run = planted
    sys.exit(cli.main(["train", str(config), *more]))
"""


def start(config: Config, body: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that trains with the fault that `body` plants, with more environment variables."""
    path = folder / "faults.yaml"
    path.write_text(dump_config(config, []))
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE.format(config=str(path)) + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment, "COLUMNS": "200"},
    )
