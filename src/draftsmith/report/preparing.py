"""`draftsmith data prepare` as a person meets it."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from draftsmith.data.contamination import PromptIndex
from draftsmith.data.conversations import find_sources, read_prompts
from draftsmith.data.crew import Work, processes_for
from draftsmith.data.prepare import Prepared, Preparer, Progress
from draftsmith.data.settings import TemplateSettings
from draftsmith.data.template import Renderer
from draftsmith.decisions import Decision
from draftsmith.pipeline.machine import this_machine
from draftsmith.report.console import say
from draftsmith.report.ticker import Ticker
from draftsmith.target.load import TargetSpec

PLAIN_EVERY_S = 5.0
HISTOGRAM_WIDTH = 40


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """What `data prepare` was asked for."""

    files: Sequence[str]
    target: str
    revision: str | None
    out: Path
    form: str | None
    template: TemplateSettings
    processes: int | None
    prompts: Sequence[str] = ()
    drop_contaminated: bool = False


def prepare_and_show(options: PrepareOptions, stop: threading.Event) -> None:
    """Prepares data, showing decisions, progress and a summary. The last line counts conversations."""
    renderer = Renderer(TargetSpec(options.target, options.revision).tokenizer(), options.template)
    sources = find_sources(options.files, options.form)
    total_bytes = sum(source.path.stat().st_size for source in sources)
    processes = options.processes or processes_for(total_bytes, this_machine().cores)
    reason = "asked for" if options.processes else f"{total_bytes / 1e6:,.1f} MB to read"
    for decision in [*(s.decision for s in sources), *renderer.decisions, Decision("processes", processes, reason)]:
        say(str(decision))
    index = PromptIndex(read_prompts(options.prompts)) if options.prompts else None
    work = Work(renderer, index, options.drop_contaminated)
    begin = time.perf_counter()
    with _Shown(total_bytes) as shown:
        prepared = Preparer(sources, work, options.out, processes).run(stop, shown)
    if prepared is None:
        say(f"stopped; the same command goes on from here: {options.out} keeps what is done")
        return
    seconds = time.perf_counter() - begin
    for line in summary_lines(prepared):
        say(line)
    if options.prompts:
        say(contamination_line(prepared, options))
    if prepared.reused:
        say(f"{seconds:.1f} s; {prepared.reused} of {prepared.shards} shards were there already")
    else:
        records = prepared.kept + prepared.rejected
        say(f"{seconds:.1f} s, {records / seconds:,.0f} conversations/s, {total_bytes / seconds / 1e6:.1f} MB/s")
    if prepared.rejected:
        say(f"why conversations were rejected: {options.out}/rejects.jsonl")
    say(f"{prepared.kept} conversations kept, {prepared.rejected} rejected")


def contamination_line(prepared: Prepared, options: PrepareOptions) -> str:
    """How many conversations contain evaluation prompts, and what to do about it."""
    found = f"{prepared.contaminated} conversations contain {prepared.prompts_found} of the evaluation prompts"
    if not prepared.contaminated:
        return f"contamination: {found}"
    did = "dropped" if options.drop_contaminated else "kept; --drop-contaminated drops them"
    return f"contamination: {found}, {did}: {options.out}/contamination.jsonl"


def summary_lines(prepared: Prepared) -> list[str]:
    """Documents, tokens, supervised share, duplicates and a histogram of lengths."""
    share = prepared.supervised / max(1, prepared.tokens)
    lines = [
        f"{prepared.documents} documents, {prepared.tokens} tokens, {share:.1%} supervised, "
        f"{prepared.duplicates} conversations are copies of others"
    ]
    most = max(prepared.lengths.values(), default=0)
    for length, count in prepared.lengths.items():
        lines.append(f"{'up to ' + length:>16} tokens {'#' * -(-HISTOGRAM_WIDTH * count // most):40} {count}")
    return lines


class _Shown(Ticker):
    """How far preparing is."""

    def __init__(self, total_bytes: int) -> None:
        columns = [BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.description}")]
        super().__init__(*columns, every_s=PLAIN_EVERY_S, total=total_bytes)

    def __call__(self, progress: Progress) -> None:
        counted = f"{progress.kept} kept, {progress.rejected} rejected"
        share = progress.read_bytes / max(1, progress.total_bytes)
        line = f"{share:.0%} of {progress.total_bytes / 1e6:,.0f} MB; {counted}"
        self.show(line, shown=counted, completed=progress.read_bytes)
