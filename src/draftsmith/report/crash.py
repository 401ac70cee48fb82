"""`crash-report.json`: what is needed to understand a run that ended badly, and nothing that must stay private.

It holds versions, settings, decisions, where every thread was (files and lines, no values), the channel's level, the
last metrics and the compilations. No text of the data, no environment; secrets are taken out, and absolute paths are
cut down to the file's name, of code with its folder.
"""

import faulthandler
import importlib.metadata
import json
import os
import platform
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith import __version__
from draftsmith.compile import guard
from draftsmith.config import Config
from draftsmith.errors import InputError
from draftsmith.nouns import StepRecord
from draftsmith.pipeline.channel import ChannelStatistics
from draftsmith.redaction import without_secrets

NAME, EARLIER = "crash-report.json", "crash-report.old.json"
FATAL = "fatal-stacks.txt"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "peft")
KILLED = "the attempt before ended without a word: aborted, killed (by the kernel if memory was short), or a power cut"
LAST_METRICS, LAST_COMPILATIONS = 10, 20


@dataclass(frozen=True, eq=False, slots=True)
class Scene:
    """A run at the moment it failed."""

    worker: str  # that failed first
    stacks: Mapping[str, Sequence[str]]  # of all threads
    workers: Mapping[str, str]  # what each one did, and for how long
    channel: ChannelStatistics
    metrics: Sequence[StepRecord]  # the last ones
    decisions: Sequence[str]


@contextmanager
def reported(folder: Path, config: Config, log: Callable[[str], None]) -> Iterator[None]:
    """Around what comes before the workers: what nobody foresaw leaves a report, a user's mistake does not."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        log(_write(folder / NAME, crash_report(config, error, None)))
        raise


@contextmanager
def flight_recorder(
    folder: Path, config: Config, scene: Callable[[], Scene], log: Callable[[str], None]
) -> Iterator[None]:
    """Around a run: whatever ends it early leaves a report; that of an earlier attempt is kept under another name once
    all is well.

    A fatal signal (a segmentation fault in native code) leaves no time for a report: Python's own handler writes the
    stacks into `fatal-stacks.txt`, and the next attempt makes a report of them. If that file is there and empty, the
    attempt before had no time even for that.
    """
    fatal = folder / FATAL
    if fatal.exists():
        stacks = fatal.read_text(errors="replace").splitlines()
        summary = f"the attempt before was ended by a fatal error in native code: {stacks[0]}" if stacks else KILLED
        report = _header(config) | {"summary": [summary], "stacks": stacks}
        log(f"warning: {summary}" + (f"; {_write(folder / NAME, report)}" if stacks else ""))
    with fatal.open("w") as file:
        ours = not faulthandler.is_enabled()  # somebody else's handler stays as it is
        if ours:
            faulthandler.enable(file)
        try:
            yield
        except BaseException as error:
            log(_write(folder / NAME, crash_report(config, error, scene())))
            raise
        finally:
            if ours:
                faulthandler.disable()
            fatal.unlink(missing_ok=True)
    _put_by(folder)


def clear_reports(folder: Path) -> None:
    """For a run that is finished: does what a kill kept its `flight_recorder` from doing."""
    _put_by(folder)
    if (folder / FATAL).exists() and not (folder / FATAL).read_bytes():
        (folder / FATAL).unlink()


def _put_by(folder: Path) -> None:
    if (folder / NAME).is_file():
        (folder / NAME).replace(folder / EARLIER)


def crash_report(config: Config, error: BaseException, scene: Scene | None) -> dict[str, Any]:
    """The report as plain data, not yet cleaned. `scene` is None if no worker was running."""
    report = _header(config) | {
        "summary": _summary(error, scene),
        "error": {
            "type": type(error).__name__,
            "message": str(error),
            "notes": list(getattr(error, "__notes__", [])),
            "traceback": "".join(traceback.format_exception(error)).splitlines(),
        },
        "compilations": {
            "all": guard.count_compilations(),
            "guarded": [asdict(event) for event in guard.process_guard().compilations[-LAST_COMPILATIONS:]],
        },
    }
    if scene is not None:
        report |= {
            "worker": scene.worker,
            "workers": dict(scene.workers),
            "threads": {name: list(frames) for name, frames in scene.stacks.items()},
            "channel": asdict(scene.channel),
            "last_metrics": [asdict(record) for record in scene.metrics[-LAST_METRICS:]],
            "decisions": list(scene.decisions),
        }
    return report


def _header(config: Config) -> dict[str, Any]:
    """What does not depend on how it ended."""
    settings = config.model_dump(mode="json")
    places = [("run", "dir"), ("target", "model"), ("target", "adapter"), ("drafter", "init"), ("store", "dir")]
    for section, key in places:
        settings[section][key] = _name(settings[section][key])
    for section, key in (("data", "train"), ("eval", "prompts")):
        settings[section][key] = [_name(file) for file in settings[section][key] or []]
    return {
        "summary": [],
        "versions": {"draftsmith": __version__, "python": platform.python_version()} | _versions(),
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "devices": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
            "threads": torch.get_num_threads(),
        },
        "config": settings,
    }


def _write(path: Path, report: Mapping[str, Any]) -> str:
    """Returns a line that says where the report is, or why it is not there."""
    try:
        text = json.dumps(_clean(report), indent=2, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as hindrance:
        return f"{path} cannot be written: {hindrance.strerror}"
    return f"{path} says more; it holds no data and no secrets and may be attached to an issue"


def _summary(error: BaseException, scene: Scene | None) -> list[str]:
    """At most a screen."""
    lines = [f"draftsmith {__version__}, torch {torch.__version__}, Python {platform.python_version()}"]
    if scene is None:
        return [*lines, f"failed while preparing: {type(error).__name__}: {error}"]
    step = scene.metrics[-1].step if scene.metrics else 0
    channel = scene.channel
    lines += [
        f"{scene.worker} failed after step {step}: {type(error).__name__}: {error}",
        f"channel: {channel.items} rows, {channel.used_bytes / 2**20:.1f} of {channel.capacity_bytes / 2**20:.0f} MiB",
    ]
    return lines + [f"{name}: {doing}" for name, doing in scene.workers.items()][:16]


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def _name(place: str | None) -> str | None:
    """A hub id as it is; of a path only the last part."""
    if place is None or not (place.startswith(("/", "~", ".")) or ("/" in place and Path(place).exists())):
        return place
    return f"…/{Path(place).name}"


_PATH = re.compile(r"(?<![\w:/.~…])~?(?:/[^\s/'\":,;()\[\]]+)+")  # absolute, or below a home directory


def _name_alone(match: re.Match[str]) -> str:
    path = Path(match[0])
    kept = path.parts[-2:] if path.suffix == ".py" else path.parts[-1:]
    return "/".join(["…", *kept])


def _clean(value: Any) -> Any:
    """Plain data without secrets and without the user's folders; numbers that JSON lacks become None."""
    if isinstance(value, str):
        return _PATH.sub(_name_alone, without_secrets(value))
    if isinstance(value, Mapping):
        return {_clean(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
