"""Ten minutes at 3+2 with drafters that are slower than the targets: nothing grows, nothing is lost or repeated.

Sampled once a second inside the process: memory, threads, open files, bytes in the channel. Rows are noted where their
loss is computed.
"""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.config import Config
from planted import start

MakeConfig = Callable[..., Config]
MINUTES = 10
CHANNEL_MIB = 8

SOAK = """
import json, signal
from draftsmith.pipeline.workers import DrafterWorker

forward = DrafterWorker.forward
rows = open({rows!r}, "a", buffering=1)


def slow(self, features, blocks):
    print(features.row.index, file=rows)
    time.sleep(0.1)
    return forward(self, features, blocks)


DrafterWorker.forward = slow


def plant(run):
    def sample():
        with open({samples!r}, "a", buffering=1) as out:
            for second in range({seconds}):
                status = Path("/proc/self/status").read_text()
                kib = int(status.split("VmRSS:")[1].split()[0])
                channel = run.channel.statistics()
                files = len(os.listdir("/proc/self/fd"))
                print(json.dumps({{
                    "rss_mib": kib / 1024, "threads": threading.active_count(), "files": files,
                    "used_bytes": channel.used_bytes, "peak_bytes": channel.peak_bytes,
                }}), file=out)
                time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=sample, name="sampler", daemon=True).start()

go(plant)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_grows_in_ten_minutes(demo_config: MakeConfig, tmp_path: Path) -> None:
    config = demo_config(
        run__dir=str(tmp_path / "run"), topology="3+2", train__steps=10**6, data__row_tokens=512,
        pipeline__threads=1, pipeline__channel_mib=CHANNEL_MIB, checkpoint__every=20, eval__every=30, eval__limit=2,
        eval__max_new_tokens=32,
    )  # fmt: skip
    names = {name: str(tmp_path / name) for name in ("rows", "samples")}
    process = start(config, SOAK.format(**names, seconds=60 * MINUTES), tmp_path)
    _, err = process.communicate(timeout=60 * (MINUTES + 5))
    assert process.returncode == 143, err
    samples: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "samples").read_text().splitlines()]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    early, late = samples[60:180], samples[-120:]
    rss_mib = [statistics.median(sample["rss_mib"] for sample in part) for part in (early, late)]
    drift = rss_mib[1] / rss_mib[0] - 1
    peak_mib = max(sample["peak_bytes"] for sample in samples) / 2**20
    full = statistics.mean(sample["used_bytes"] for sample in samples) / 2**20
    print(f"{len(steps)} steps, RSS {rss_mib[0]:.0f} -> {rss_mib[1]:.0f} MiB ({drift:+.2%})")
    print(f"channel {full:.1f} MiB, at most {peak_mib:.1f}; threads {sorted({s['threads'] for s in samples})}")
    assert drift < 0.02
    assert peak_mib <= CHANNEL_MIB
    assert full > CHANNEL_MIB / 2, "the drafters were not slower: this measures nothing"
    assert len({sample["threads"] for sample in early + late}) == 1
    assert statistics.median(s["files"] for s in late) == statistics.median(s["files"] for s in early)
    assert steps == list(range(1, len(steps) + 1))
    seen = Counter(int(line) for line in (tmp_path / "rows").read_text().split())
    assert seen == Counter(range(len(steps) * config.train.rows_per_step)), "a row was lost or learned from twice"
