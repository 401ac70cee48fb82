"""Caches and models change between transformers' versions; decoding is tested with the oldest supported one, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST = "5.15.0"
TESTS = ["test_families.py", "test_speculate.py", "test_tree.py"]


@pytest.fixture(scope="session")
def oldest(request: pytest.FixtureRequest) -> Path:
    """A folder that holds the oldest transformers with its dependencies, kept between runs."""
    folder = request.config.rootpath / ".cache" / f"transformers-{OLDEST}"
    if not (folder / "complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder)]
        subprocess.run([*pip, f"transformers=={OLDEST}"], check=True)
        (folder / "complete").touch()
    return folder


@pytest.mark.slow
def test_decoding_is_right_with_the_oldest_transformers(oldest: Path) -> None:
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(oldest), str(source)])}
    version = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    found = subprocess.run(version, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == OLDEST
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = [str(Path(__file__).with_name(name)) for name in TESTS]
    done = subprocess.run([*pytest_run, *tests], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
