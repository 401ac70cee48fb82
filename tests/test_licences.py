"""docs/licences.md names every direct dependency, with the licence that its metadata states."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
KINDS = ["Apache", "BSD-2", "BSD-3", "0BSD", "BSD", "BSL", "MIT", "MPL", "Zlib", "CC0", "LGPL", "GPL", "AGPL"]


def kinds(text: str) -> set[str]:
    """Families of licences that a text names: metadata spells one licence in many ways."""
    found = {kind for kind in KINDS if re.search(rf"(?<![A-Za-z0-9]){kind}(?![a-z])", text)}
    return found - ({"BSD"} if found & {"BSD-2", "BSD-3", "0BSD"} else set())


def stated(package: str) -> set[str] | None:
    """None if the package is not installed."""
    try:
        about = metadata(package)
    except PackageNotFoundError:
        return None
    if about.get("License-Expression"):
        return kinds(about["License-Expression"])
    classifiers = [line for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
    return kinds(" ".join([about.get("License") or "", *classifiers]).replace("Apache Software", "Apache"))


def listed() -> dict[str, set[str]]:
    rows = re.findall(r"^\| ([\w-]+) \| ([^|]+) \|", (ROOT / "docs" / "licences.md").read_text(), re.M)
    return {name: kinds(licence) for name, licence in rows if name != "package"}


def wanted() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return {Requirement(line).name for group in groups for line in group} - {"draftsmith"}


def test_every_direct_dependency_is_listed() -> None:
    assert set(listed()) == wanted()


def test_licences_are_those_of_the_metadata() -> None:
    installed = {name: found for name in wanted() if (found := stated(name)) is not None}
    assert len(installed) >= 13
    assert {name: listed()[name] for name in installed} == installed


def test_nothing_that_is_installed_for_use_is_copyleft() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        assert not listed()[Requirement(line).name] & {"GPL", "LGPL", "AGPL", "MPL"}
