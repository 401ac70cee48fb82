"""Documents say what the program does."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from draftsmith import cli
from draftsmith.config import Config, load_config, parse_config

ROOT = Path(__file__).parents[1]


def schema_table(model: type[BaseModel] = Config, prefix: str = "") -> str:
    """The table of docs/configuration.md, made from the schema."""
    lines = []
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            lines.append(schema_table(info.annotation, f"{prefix}{name}."))
            continue
        default = "required" if info.is_required() else f"`{yaml.safe_dump(info.default).split()[0]}`"
        lines.append(f"| `{prefix}{name}` | {default} | {info.description or ''} |")
    return "\n".join(lines)


def test_the_configuration_page_is_the_schema() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert schema_table() in page, f"docs/configuration.md should hold:\n{schema_table()}"


def test_every_key_is_described() -> None:
    assert "|  |" not in schema_table()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_parses(path: Path) -> None:
    load_config(path)


def test_the_readme_config_parses() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    config = parse_config(yaml.safe_load(block), "README.md")
    assert config.topology == "auto"


def test_every_readme_command_exists() -> None:
    """Arguments of every `draftsmith` line are accepted by the parser; every `make` target exists."""
    text = (ROOT / "README.md").read_text()
    lines = [line.split("#")[0].strip() for line in text.splitlines() if line.startswith("    ")]
    ours = [shlex.split(line)[1:] for line in lines if line.startswith("draftsmith ")]
    assert len(ours) >= 3
    for arguments in ours:
        assert callable(cli._parser().parse_args(arguments).command)
    makefile = (ROOT / "Makefile").read_text()
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert {"demo", "test"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_relative_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"


def fault_tests() -> list[str]:
    """The last column of the table of faults."""
    page = (ROOT / "docs" / "faults.md").read_text()
    return re.findall(r"\| `(tests/[^`]+)` \|$", page, re.MULTILINE)


def test_every_fault_names_a_test_that_exists() -> None:
    page, named = (ROOT / "docs" / "faults.md").read_text(), fault_tests()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| fault ")]
    assert len(named) == len(rows) >= 25
    for test in named:
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(), test
