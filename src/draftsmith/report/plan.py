"""A plan as a person reads it: tables on a terminal, aligned plain text elsewhere."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.pipeline.memory import MIB, totals
from draftsmith.pipeline.plan import USABLE, Plan, gib

Line = tuple[str, str, str]


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Machine, decisions, memory, and whether it fits."""
    console = console or Console()
    for title, head, lines in sections(plan):
        if console.is_terminal:
            table = Table(*head, title=Text(title), title_justify="left")
            for line in lines:
                cells = (Text(cell) for cell in line)  # not markup: a path may hold brackets
                table.add_row(*cells, style="bold" if line[0] == "total" else None)
            console.print(table)
        else:
            console.print(plain(title, head, lines), markup=False, highlight=False, soft_wrap=True)
    if plan.refusal is None:
        console.print("fits; nothing was loaded or trained", markup=False, highlight=False, soft_wrap=True)


def sections(plan: Plan) -> list[tuple[str, Line, list[Line]]]:
    """Title, column heads and lines of every part. Places with the same entries share a part."""
    found: list[tuple[str, Line, list[Line]]] = []
    decisions = [(d.name, "unknown" if d.value is None else str(d.value), d.reason) for d in plan.decisions]
    found.append((f"Machine: {plan.machine}", ("decision", "value", "reason"), decisions))
    alike: dict[tuple[Line, ...], list[str]] = {}
    for place, need in totals(plan.memory).items():
        entries = [(item.name, _size(item.nbytes), item.formula) for item in plan.memory if item.place == place]
        capacity = plan.machine.capacity(place)
        fits = "fits" if need <= USABLE * capacity else "DOES NOT FIT"
        entries.append(("total", _size(need), f"of {gib(capacity)} GiB, {gib(USABLE * capacity)} usable: {fits}"))
        alike.setdefault(tuple(entries), []).append(place)
    for lines, places in alike.items():
        where = places[0] if len(places) == 1 else f"{', '.join(places)}, each"
        found.append((f"Memory of {where}{_roles(plan, places[0])}", ("what", "size", "how"), list(lines)))
    return found


def _roles(plan: Plan, place: str) -> str:
    topology = plan.sizes.topology
    roles = [role for role, names in (("target", topology.target), ("drafter", topology.drafter)) if place in names]
    return f" ({' and '.join(roles)})" if roles else ""


def plain(title: str, head: Line, lines: Sequence[Line]) -> str:
    """Columns of equal width, no lines, nothing cut."""
    first, second = (max(len(line[column]) for line in [head, *lines]) for column in (0, 1))
    numbers = head[1] == "size"
    rows = [f"  {a:<{first}}  {b:>{second}}  {c}" if numbers else f"  {a:<{first}}  {b}  ({c})" for a, b, c in lines]
    return "\n".join([title, *rows, ""])


def _size(nbytes: int) -> str:
    return f"{gib(nbytes)} GiB" if nbytes >= 1024 * MIB else f"{nbytes / MIB:.1f} MiB"
