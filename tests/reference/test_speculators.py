"""speculators 0.9.0 loads an exported folder and drafts the same logits as we do from the same features."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from environments import environment
from safetensors.torch import load_file, save_file

from conftest import demo_shape, run_training
from draftsmith import embedded
from draftsmith.config import Config
from draftsmith.data.conversations import read_prompts
from draftsmith.data.template import Renderer
from draftsmith.decode.states import DraftState
from draftsmith.drafter.checkpoint import save_drafter
from draftsmith.drafter.init import random_init
from draftsmith.drafter.model import Drafter
from draftsmith.export.convert import export_drafter, import_drafter
from draftsmith.report.session import load_pair
from draftsmith.target.load import Target, TargetSpec

pytestmark = pytest.mark.slow
ANCHORS = [5, 6, 19, 33, 40]


@pytest.fixture(scope="session")
def speculators_python() -> Path:
    """What speculators 0.9.0 needs to load and run a drafter: it wants transformers 5.19 at most."""
    needs = ["torch==2.13.0", "transformers==5.19.0", "datasets<=5.1.0", "openai", "loguru==0.7.3"]
    own = ["speculators==0.9.0", "hs-connectors==0.9.0"]
    return environment("DRAFTSMITH_SPECULATORS_VENV", "reference-speculators-0.9.0", needs, own)


def test_speculators_drafts_the_same_logits(
    speculators_python: Path, demo_config: Callable[..., Config], tmp_path: Path
) -> None:
    """After enough training that the logits say something; every slot of five blocks."""
    result, _, _ = run_training(demo_config(train__steps=12))
    target, drafter = load_pair(TargetSpec("demo"), result.folder / "draft", torch.device("cpu"))
    export_drafter(str(result.folder / "draft"), "speculators", tmp_path / "speculators")
    renderer = Renderer(target.tokenizer)
    ids = [token for prompt in read_prompts(["demo"])[:3] for token in renderer.prompt_ids(prompt)][:64]
    tokens_T = torch.tensor(ids)
    features_TF = target.features([tokens_T])[0]
    inputs = {"features_TF": features_TF, "tokens_T": tokens_T, "anchors_N": torch.tensor(ANCHORS)}
    save_file(inputs, tmp_path / "inputs.safetensors")
    script = Path(__file__).with_name("run_speculators.py")
    files = [tmp_path / "speculators", tmp_path / "inputs.safetensors", tmp_path / "out.safetensors"]
    done = subprocess.run([speculators_python, script, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs_NBV = load_file(tmp_path / "out.safetensors")["logits_NBV"]
    size = drafter.config.block_size
    for n, anchor in enumerate(ANCHORS):
        state = DraftState(drafter, target.embedding_VH, target.head_VH, anchor)
        with torch.inference_mode():
            state.extend(features_TF[:anchor])
            ours_BV = state.logits(ids[anchor], size)
        difference = float((ours_BV - theirs_NBV[n, 1:]).abs().max())
        print(f"anchor {anchor}: largest difference {difference:.1e}, largest logit {float(ours_BV.abs().max()):.2f}")
        assert difference <= 1e-4


def test_a_folder_that_speculators_converted_is_taken_in_bit_for_bit(
    speculators_python: Path, demo_target: Target, tmp_path: Path
) -> None:
    """Its own converter makes the folder from ours; `import` gives back what we had."""
    drafter = Drafter(demo_shape(demo_target))
    random_init(drafter, 3)
    save_drafter(tmp_path / "draft", drafter, dtype=torch.bfloat16, provenance={}, card="")
    code = "import sys; from speculators.convert.dflash import DFlashConverter as C; C().convert(*sys.argv[1:])"
    files = [tmp_path / "draft", tmp_path / "theirs", embedded.TARGET]
    done = subprocess.run([speculators_python, "-c", code, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    import_drafter(str(tmp_path / "theirs"), tmp_path / "back", TargetSpec("demo"))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "draft" / name).read_bytes()
