"""`draftsmith data regenerate` as a person meets it."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from draftsmith.data.regenerate.run import Answers, Inputs, Regenerated, regenerate
from draftsmith.data.regenerate.server import ServerAnswers, ServerSettings
from draftsmith.data.regenerate.tasks import ERROR, SUCCESS, Outcome, Sampling
from draftsmith.data.settings import TemplateSettings, parse_values
from draftsmith.errors import ConfigError
from draftsmith.report.console import say
from draftsmith.report.ticker import Ticker

PLAIN_EVERY_S = 10.0
SENT = ("model", "messages", "prompt", "tools", "stream")  # of a request, besides what options set


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """A model in this process."""

    target: str
    revision: str | None
    adapter: str | None
    device: str
    batch_size: int
    template: TemplateSettings


def regenerate_and_show(
    inputs: Inputs,
    out: Path,
    how: LocalOptions | ServerSettings,
    sampling: Sampling,
    stop: threading.Event,
    *,
    retry_errors: bool = False,
) -> None:
    """Answers and shows how far it is. The last line counts records."""
    answers, more = _open(how, sampling, stop)
    settings: dict[str, Any] = {"inputs": list(inputs.files), "form": inputs.form, "sampling": asdict(sampling)} | more
    begin = time.perf_counter()
    try:
        with _Shown() as shown:
            done = regenerate(inputs, out, settings, answers, stop, retry_errors=retry_errors, watch=shown)
    finally:
        answers.close()
    if done is None:
        say(f"stopped; the same command goes on from here: {out} keeps what is done")
        return
    seconds = time.perf_counter() - begin
    say(f"{done.asked} records asked in {seconds:.1f} s, {done.tokens} tokens, {done.tokens / seconds:.0f} tokens/s")
    say(f"answers: {out}/answers.jsonl" + (f"; why others have none: {out}/rejects.jsonl" if _without(done) else ""))
    say(f"{done.success} answered + {done.error} errors + {done.skipped} skipped = {done.total} records")


def _without(done: Regenerated) -> int:
    return done.error + done.skipped


def _open(
    how: LocalOptions | ServerSettings, sampling: Sampling, stop: threading.Event
) -> tuple[Answers, dict[str, Any]]:
    """What answers, and the settings that decide its answers."""
    if isinstance(how, ServerSettings):
        served = ServerAnswers(how, sampling, stop)
        say(f"model: {served.model} at {', '.join(how.urls)}; the server's own chat template is used")
        return served, {"model": served.model, "servers": list(how.urls), "fields": dict(how.fields)}
    from draftsmith.data.regenerate.local import LocalAnswers  # heavy: not needed to ask a server
    from draftsmith.data.template import Renderer
    from draftsmith.pipeline.machine import this_machine
    from draftsmith.pipeline.topology import choose_device, choose_topology, device_of
    from draftsmith.target.load import TargetSpec

    count = len(this_machine().devices)
    kind = str(choose_device(how.device, count).value)
    topology: Any = choose_topology("auto", kind, count).value
    spec = TargetSpec(how.target, how.revision, adapter=how.adapter)
    renderer = Renderer(spec.tokenizer(), how.template)
    device = device_of(topology.target[0])
    say(f"model: {spec.path} on {device}, {how.batch_size} prompts to a batch")
    local = LocalAnswers(spec, renderer, device, sampling, how.batch_size, stop)
    given: dict[str, Any] = {"model": how.target, "revision": how.revision, "adapter": how.adapter}
    return local, given | {"template": how.template.to_json(), "batch_size": how.batch_size}


def read_api_key(variable: str | None, file: Path | None) -> str | None:
    """The key from an environment variable or a file, neither of which is repeated anywhere.

    Raises:
        ConfigError: it is not there.
    """
    if variable is not None:
        key = os.environ.get(variable, "").strip()
        if not key:
            raise ConfigError(f"--api-key-env {variable}: there is no such environment variable, or it is empty")
        return _sendable(key, f"--api-key-env {variable}")
    if file is None:
        return None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from None
    if not key or "\n" in key:
        raise ConfigError(f"--api-key-file {file} should hold the key and nothing else")
    return _sendable(key, f"--api-key-file {file}")


def _sendable(key: str, source: str) -> str:
    """A key that fits into a header."""
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{source}: the key has characters that no HTTP header can hold; copy it again")
    return key


def parse_fields(given: Sequence[str]) -> dict[str, Any]:
    """More of every request, as `name=value`.

    Raises:
        ConfigError: names the argument.
    """
    fields = parse_values("--request-field", given)
    taken = [name for name in fields if name in SENT]
    if taken:
        raise ConfigError(f"--request-field {taken[0]}: draftsmith fills it; leave it out")
    return fields


class _Shown(Ticker):
    """How many answers there are."""

    def __init__(self) -> None:
        columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
        super().__init__(*columns, every_s=PLAIN_EVERY_S, description="waiting for the first answer")
        self._success = self._error = self._tokens = 0

    def __call__(self, outcome: Outcome) -> None:
        self._success += outcome.status == SUCCESS
        self._error += outcome.status == ERROR
        self._tokens += outcome.tokens
        self.show(f"{self._success} answered, {self._error} errors, {self._tokens} tokens")
