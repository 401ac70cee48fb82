"""What can be told about a chat template by reading it."""

from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables

_OURS = {"messages", "add_generation_prompt", "raise_exception"}


@dataclass(frozen=True, slots=True)
class Used:
    """Variables that a template takes, names and keys it mentions, and how it writes the arguments of a tool call:
    from an `object`, from `json`, or None if it takes both or does not say."""

    variables: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    call_arguments: str | None = None


def used_by(template: str) -> Used:
    """Reads a template; one that cannot be parsed uses nothing (rendering says what is wrong with it)."""
    try:
        tree = Environment(extensions=[_Marks, "jinja2.ext.loopcontrols"]).parse(template)
        variables = find_undeclared_variables(tree)
    except TemplateError:
        return Used()
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return Used(frozenset(variables - _OURS), frozenset(names), _call_arguments(tree))


def _call_arguments(tree: nodes.Template) -> str | None:
    tested = any(_is_arguments(test.node) for test in tree.find_all(nodes.Test) if test.name in ("string", "mapping"))
    if tested:
        return None
    if any(_is_arguments(f.node) for f in tree.find_all(nodes.Filter) if f.name in ("tojson", "items", "dictsort")):
        return "object"
    if any(_is_arguments(a.node) for a in tree.find_all(nodes.Getattr) if a.attr == "items"):
        return "object"
    joined = [side for add in tree.find_all(nodes.Add) for side in (add.left, add.right)]
    joined += [part for concat in tree.find_all(nodes.Concat) for part in concat.nodes]
    return "json" if any(_is_arguments(node) for node in joined) else None


def _is_arguments(node: nodes.Expr | None) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "arguments"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"
    return isinstance(node, nodes.Name) and node.name == "arguments"


class _Marks(Extension):
    """Lets a template with generation marks be parsed."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
