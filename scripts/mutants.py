"""Do the quick tests of what must not be wrong notice when it is? Branch coverage, then a sample of seeded mutants.

mutmut changes one place of a module at a time and runs those of the selected tests that reach it, in a process of its
own that is stopped if it hangs. Besides its own changes, calls and errors are left out and conditions are fixed here.
Modules and tests are listed in `pyproject.toml` ([tool.mutmut]). The mutants of each group are drawn by seed, so a run
can be repeated; everything is written to `mutants/`. From the repository's root:

    python scripts/mutants.py [--seed 0] [--each 50] [--groups masks loss]
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
from mutmut import __main__ as mutmut
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.mutation.mutators import mutation_operators
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name

GROUPS = {
    "anchors": ["anchors"],
    "masks": ["layout", "blockwise", "kernels", "flex"],
    "loss": ["loss"],
    "gradient sums": ["gradsync"],
    "checkpointing": ["checkpoint"],
}
KILLED = {"killed", "timeout", "segfault"}
FOLDER = Path("mutants")  # mutmut's own choice


def leave_out(statement: cst.Expr | cst.Raise) -> Iterator[cst.Pass]:
    """A call whose value nobody uses (a barrier, a copy, a rename) is not made, an error not raised."""
    if isinstance(statement, cst.Raise) or isinstance(statement.value, cst.Call):
        yield cst.Pass()


def fix_condition(branch: cst.If) -> Iterator[cst.If]:
    """Always taken, never taken."""
    for value in ("True", "False"):
        yield branch.with_changes(test=cst.Name(value))


def add_operators() -> None:
    mutation_operators.extend([(cst.Expr, leave_out), (cst.Raise, leave_out), (cst.If, fix_condition)])


def mutants_of(path: Path) -> list[str]:
    """Names of all mutants of a module, in the order of its source."""
    return [get_mutant_name(path, name) for name in mutate_file_contents(str(path), path.read_text()).mutant_names]


def sample(groups: dict[str, list[Path]], seed: int, each: int) -> dict[str, list[str]]:
    """Up to `each` mutants per group, drawn without repetition from all mutants of its modules."""
    drawn = {}
    for group, modules in groups.items():
        names = [name for path in modules for name in mutants_of(path)]
        drawn[group] = sorted(random.Random(f"{seed} {group}").sample(names, min(each, len(names))))
        print(f"{group}: {len(drawn[group])} of {len(names)} mutants")
    return drawn


def statuses(modules: list[Path]) -> dict[str, str]:
    """What became of each mutant, as mutmut noted it."""
    codes: dict[str, int | None] = {}
    for path in modules:
        codes |= json.loads((FOLDER / f"{path}.meta").read_text())["exit_code_by_key"]
    return {name: status_by_exit_code[code] for name, code in codes.items()}


def report(drawn: dict[str, list[str]], status: dict[str, str]) -> None:
    """The survivors as diffs, then a table with a line per group."""
    everything = [name for names in drawn.values() for name in names]
    for name in everything:
        if status[name] not in KILLED:
            print(f"\n{name}: {status[name]}\n{get_diff_for_mutant(name)}")
    print("\n| | mutants | killed | of these by time-out | survived | share |\n|---|---:|---:|---:|---:|---:|")
    for group, names in (drawn | {"all": everything}).items():
        found = Counter(status[name] for name in names)
        killed = sum(found[what] for what in KILLED)
        share = f"{100 * killed / len(names):.1f} %"
        print(f"| {group} | {len(names)} | {killed} | {found['timeout']} | {len(names) - killed} | {share} |")


def coverage(modules: list[Path], tests: list[str]) -> None:
    """Runs the selected tests once and prints the branch coverage of the modules."""
    tool, data = [sys.executable, "-m", "coverage"], f"--data-file={FOLDER / 'coverage'}"
    only = f"--include={','.join(map(str, modules))}"  # by path: a name would import its package, and so torch
    subprocess.run([*tool, "run", data, "--branch", only, "-m", "pytest", "--quiet", *tests], check=True)
    subprocess.run([*tool, "report", data, "--show-missing", "--fail-under=90"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=50, help="mutants per group")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS), metavar="GROUP")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    add_operators()
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    groups = {
        group: [path for path in map(Path, settings["only_mutate"]) if path.stem in GROUPS[group]]
        for group in args.groups
    }
    modules = [path for paths in groups.values() for path in paths]
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    coverage(modules, settings["pytest_add_cli_args_test_selection"])
    drawn = sample(groups, args.seed, args.each)
    mutmut._run([name for names in drawn.values() for name in names], args.workers)
    report(drawn, statuses(modules))


if __name__ == "__main__":
    main()
