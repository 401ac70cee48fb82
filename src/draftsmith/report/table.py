"""The tables that `eval`, `demo` and `warmup` end with."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from draftsmith.compile.warmup import Warmed
from draftsmith.decode.evaluate import EvalReport
from draftsmith.decode.figures import Figures

ROWS: dict[str, Callable[[Figures], str]] = {
    "τ, tokens per target forward": lambda f: f"{f.tau:.2f}",
    "  95 % over prompts": lambda f: f"{f.tau_interval[0]:.2f} to {f.tau_interval[1]:.2f}",
    "  mean of prompts": lambda f: f"{f.tau_macro:.2f}",
    "tokens/s": lambda f: f"{f.tokens_per_second:.0f}",
    "speed-up": lambda f: f"{f.speedup:.2f}x",
    "identical to plain decoding": lambda f: _same(f),
    "accepted, slots 1, 2, ...": lambda f: " ".join(f"{share:.0%}" for share in f.accept_per_position),
    "repeated 4-grams": lambda f: f"{f.repetition_share:.0%}",
    "time: draft, verify, rest": lambda f: f"{f.draft_share:.0%} {f.verify_share:.0%} {f.bookkeeping_share:.0%}",
    "new tokens": lambda f: str(f.new_tokens),
}


def eval_table(report: EvalReport, tau_before: float | None = None, name: str = "drafter") -> Table:
    """Figures of an evaluation, with the untrained drafter's τ beside them if known."""
    table = Table(
        title=f"Decoding {report.prompts} prompts; plain decoding: {report.baseline_tokens_per_second:.0f} tokens/s"
    )
    table.add_column("measure", no_wrap=True)
    if tau_before is not None:
        table.add_column("untrained", justify="right")
    columns = {name: report.main, **report.others}
    for column in columns:
        table.add_column("/".join(Path(column).parts[-2:]), justify="right", overflow="fold")
    for number, (measure, shown) in enumerate(ROWS.items()):
        untrained = [] if tau_before is None else [f"{tau_before:.2f}" if number == 0 else ""]
        table.add_row(measure, *untrained, *(shown(figures) for figures in columns.values()))
    return table


def warmup_table(results: Sequence[Warmed]) -> Table:
    """What was compiled, how long it took, and whether PyTorch's disk cache had it."""
    table = Table("signature", title="Compiled ahead")
    table.add_column("seconds", justify="right")
    table.add_column("cache")
    for result in results:
        inputs = [f"  {compilation.name}: {compilation.signature}" for compilation in result.compilations]
        table.add_row(Text("\n".join([result.name, *inputs])), f"{result.seconds:.1f}", result.cache)
    table.add_section()
    table.add_row("all", f"{sum(result.seconds for result in results):.1f}", "")
    return table


def _same(figures: Figures) -> str:
    if figures.lossless is None:
        return "sampled"
    if not figures.lossless:
        return "NO"
    return f"yes, {len(figures.ties)} ties" if figures.ties else "every token"
