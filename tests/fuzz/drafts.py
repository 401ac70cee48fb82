"""Draft folders of both layouts: config, tensors, note and card changed or damaged; then loaded, exported, imported."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from conftest import tiny_config, tiny_drafter, tiny_target
from draftsmith.decode.speculate import speculative_generate
from draftsmith.drafter.checkpoint import load_drafter, read_provenance, read_tensors, save_drafter
from draftsmith.drafter.config import FULL, SLIDING
from draftsmith.drafter.init import init_from_checkpoint
from draftsmith.drafter.model import Drafter
from draftsmith.errors import InputError
from draftsmith.export import speculators
from draftsmith.export.convert import export_drafter, import_drafter
from draftsmith.pipeline.prepare import check_published
from draftsmith.report.session import print_launch_lines
from draftsmith.target.load import Target
from fuzz.fuzzing import changed, damaged, one_line
from fuzz.tensors import changed_tensors

PROVENANCE = {"draftsmith": "0.1.0", "target": "t", "target_revision": None, "target_adapter": None, "step": 3,
              "target_fingerprint": "tiny", "tau": 1.5, "decisions": {"gamma": ["4", "because"]}}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256,
        "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": (FULL, SLIDING), "sliding_window": 3},
    "yarn": {"rope_parameters": YARN, "output_multiplier": 2.0, "final_logit_softcapping": 3.0},
    "llama3": {"rope_parameters": LLAMA3, "input_embedding_scale": 2.0},
}
Folder = dict[str, bytes]


@dataclass(frozen=True)
class Example:
    """A drafter folder; None: there is a folder of that name instead of a file."""

    files: dict[str, bytes | None]


def _saved() -> list[Folder]:
    """Whole folders: each kind of layer and rotation, and the speculators layout."""
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / name for name in KINDS]
        for folder, changes in zip(folders, KINDS.values(), strict=True):
            save_drafter(folder, tiny_drafter(**changes), dtype=torch.float32, provenance=PROVENANCE, card="card")
        drafter, other = tiny_drafter(), Path(place) / "speculators"
        other.mkdir()
        config = speculators.to_json(drafter.config, "float32", "t", ["Qwen3ForCausalLM"])
        (other / "config.json").write_text(json.dumps(config))
        save_file(dict(drafter.state_dict()), other / "model.safetensors")
        return [{item.name: item.read_bytes() for item in folder.iterdir()} for folder in [*folders, other]]


def examples() -> st.SearchStrategy[Example]:
    return st.sampled_from(_saved()).flatmap(_changed_folder)


@st.composite
def _changed_folder(draw: st.DrawFn, saved: Folder) -> Example:
    files: dict[str, bytes | None] = dict(saved)
    names = draw(st.lists(st.sampled_from([*sorted(saved), "config.json", "config.json"]), min_size=1, max_size=2))
    for name in names:
        kind = draw(st.sampled_from(["damage", "change", "change", "change", "remove", "folder"]))
        content = files.get(name)
        if kind == "remove" or content is None:
            files.pop(name, None)
        elif kind == "folder":
            files[name] = None
        elif kind == "change" and name.endswith(".json") and content == saved[name]:
            files[name] = json.dumps(draw(changed(json.loads(content)))).encode()
        elif kind == "change" and name.endswith(".safetensors") and content == saved[name]:
            files[name] = draw(changed_tensors(content))
        else:
            files[name] = draw(damaged(content))
    return Example(files)


def checker(folder: Path) -> Callable[[Example], None]:
    target = tiny_target()
    draft, out = folder / "draft", folder / "out"

    def check(example: Example) -> None:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        for name, content in example.files.items():
            if content is None:
                (draft / name).mkdir()
            else:
                (draft / name).write_bytes(content)
        tasks: list[Callable[[], object]] = [
            lambda: read_provenance(draft),
            lambda: print_launch_lines("t", draft),
            lambda: _decode(draft, target),
            lambda: _warm_start(draft),
            lambda: import_drafter(str(draft), out),
            lambda: export_drafter(str(draft), "zlab", out),
        ]
        for task in tasks:
            shutil.rmtree(out, ignore_errors=True)
            try:
                task()
            except InputError as error:
                one_line(error)
                assert not out.exists()

    return check


def _warm_start(draft: Path) -> None:
    """As `drafter.init` takes it."""
    shape = tiny_config()
    check_published(shape, draft, "x")
    init_from_checkpoint(Drafter(shape), read_tensors(draft), "x")


def _decode(draft: Path, target: Target) -> None:
    """What loads can be decoded with, if it was made for this target."""
    drafter = load_drafter(draft, torch.device("cpu"))
    if (drafter.config.hidden_size, drafter.config.feature_size) != (32, 96) or drafter.config.block_size > 16:
        return
    fitting = target.tapped(drafter.config.target_layer_ids) if max(drafter.config.target_layer_ids) < 5 else None
    if fitting is not None and drafter.config.vocab_size == 64:
        speculative_generate(fitting, drafter, [1, 2, 3], 4)
