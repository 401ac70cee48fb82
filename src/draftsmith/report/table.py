"""The tables that `eval`, `demo` and `warmup` end with."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from draftsmith.compile.warmup import Warmed
from draftsmith.decode.evaluate import EvalReport


def eval_table(report: EvalReport, tau_before: float | None = None) -> Table:
    """Figures of an evaluation, with the untrained drafter's τ beside it if known."""
    table = Table(title="Greedy decoding with the drafter against plain decoding")
    table.add_column("measure")
    if tau_before is not None:
        table.add_column("untrained", justify="right")
    table.add_column("drafter", justify="right")

    def row(name: str, value: str, before: str = "") -> None:
        table.add_row(name, *([before] if tau_before is not None else []), value)

    row("τ, tokens per target forward", f"{report.tau:.2f}", f"{tau_before:.2f}" if tau_before is not None else "")
    row("tokens/s", f"{report.tokens_per_second:.0f}")
    row("tokens/s, plain decoding", f"{report.baseline_tokens_per_second:.0f}")
    row("speed-up", f"{report.speedup:.2f}x")
    same = "every token" if report.lossless and not report.ties else f"yes, {len(report.ties)} ties"
    row("identical to plain decoding", same if report.lossless else "NO")
    row("accepted, slots 1, 2, ...", " ".join(f"{share:.0%}" for share in report.accept_per_position))
    row("prompts / new tokens", f"{report.prompts} / {report.new_tokens}")
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
