"""The table that `eval` and `demo` end with."""

from rich.table import Table

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
