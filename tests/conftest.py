"""Small models and rows that all tests share. Everything is made here, from seeds; nothing is downloaded."""

import gzip
import itertools
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn.attention import flex_attention
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from draftsmith import embedded
from draftsmith.compile import guard
from draftsmith.config import Config, parse_config
from draftsmith.data.packing import PackingSettings, RowSource
from draftsmith.data.template import Document
from draftsmith.drafter.attention import flex
from draftsmith.drafter.config import FULL, DrafterConfig
from draftsmith.drafter.init import random_init
from draftsmith.drafter.model import Drafter
from draftsmith.pipeline.prepare import choose_shape
from draftsmith.pipeline.trainer import Run, RunResult, train
from draftsmith.target.capture import TapCapture, decoder_layers
from draftsmith.target.load import Target, TargetSpec, load_target


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Results and times must not depend on which test ran before."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_target() -> Target:
    return load_target(TargetSpec("demo"), (1, 2, 4, 6, 7), torch.device("cpu"))


@pytest.fixture
def flex_in_plain_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets flex attention train on the CPU: the compiler's front end traces and differentiates it as on CUDA, and plain
    operators run the graph. PyTorch has no compiled backward there, and needs no C++ compiler for this."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None)
    monkeypatch.setattr(flex.guard, "compile", partial(guard.compile, backend="aot_eager"))


def tiny_config(**changes: Any) -> DrafterConfig:
    """A drafter of random shape-independent size: 2 layers, hidden 32, 4 heads, 2 key/value heads, B 4."""
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "attention_bias": False,
        "layer_types": (FULL, FULL),
        "sliding_window": None,
        "block_size": 4,
        "target_layer_ids": (0, 1, 2),
        "num_target_layers": 5,
        "mask_token_id": 63,
    }
    return DrafterConfig(**(values | changes))


def demo_shape(target: Target) -> DrafterConfig:
    """The demo's drafter for the embedded target."""
    config = parse_config(yaml.safe_load(embedded.CONFIG.read_text()), "demo")
    mask_token = target.tokenizer.mask_token_id
    return choose_shape(config, target.config, target.taps, mask_token, target.embedding_VH.shape[0])


def tiny_drafter(seed: int = 0, **changes: Any) -> Drafter:
    """Random weights that are large enough for attention to matter."""
    drafter = Drafter(tiny_config(**changes))
    random_init(drafter, seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return drafter


def tiny_qwen3(layers: int = 5, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.2,
        **changes,
    )
    return Qwen3ForCausalLM(config).eval()


def tiny_target(stop_ids: tuple[int, ...] = (), **changes: Any) -> Target:
    """The tiny model as a target with its first three layers tapped."""
    model = tiny_qwen3(**changes)
    return Target(
        spec=TargetSpec("tiny"),
        model=model,
        config=model.config,
        tokenizer=AutoTokenizer.from_pretrained(embedded.TARGET),
        capture=TapCapture(decoder_layers(model, 5), (0, 1, 2)),
        embedding_VH=model.get_input_embeddings().weight.detach(),
        head_VH=model.get_output_embeddings().weight.detach(),
        stop_ids=stop_ids,
        fingerprint="tiny",
    )


def random_documents(seed: int, lengths: list[int], vocab: int = 60) -> list[Document]:
    """Documents whose second half or so is supervised."""
    random = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        supervised = np.zeros(length, np.bool_)
        supervised[int(random.integers(1, length // 2 + 1)) :] = True
        documents.append(Document(random.integers(0, vocab, length).astype(np.int32), supervised))
    return documents


def row_source(documents: list[Document], **changes: Any) -> RowSource:
    settings = {"row_tokens": 64, "row_anchors": 32, "anchor_density": 0.5, "packing": True, "seed": 0}
    return RowSource(documents, PackingSettings(**(settings | changes)))


@pytest.fixture(scope="session")
def some_conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 200 embedded conversations."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    with gzip.open(embedded.CONVERSATIONS, "rt") as file:
        path.write_text("".join(itertools.islice(file, 200)))
    return path


@pytest.fixture
def demo_config(tmp_path: Path, some_conversations: Path) -> Callable[..., Config]:
    """The demo's config, made small; keyword arguments are `section__key`."""

    def make(**changes: Any) -> Config:
        data = yaml.safe_load(embedded.CONFIG.read_text())
        small = {
            "run__dir": str(tmp_path / "run"),
            "train__steps": 4,
            "train__rows_per_step": 4,
            "data__train": [str(some_conversations)],
            "data__row_tokens": 256,
            "eval__every": 0,
            "checkpoint__every": 0,
        }
        for path, value in (small | changes).items():
            section, _, key = path.partition("__")
            if key:
                data.setdefault(section, {})[key] = value
            else:
                data[section] = value
        return parse_config(data, "test")

    return make


class Quiet:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.lines: list[str] = []

    def step(self, record: Any, tau: float | None) -> None:
        self.records.append((record, tau))

    def log(self, line: str) -> None:
        self.lines.append(line)


def run_training(
    config: Config, *, resume: bool = False, stop: threading.Event | None = None
) -> tuple[RunResult, Quiet, list[Run]]:
    """Trains quietly; returns the result, what the listener heard, and the run's objects."""
    quiet, runs = Quiet(), []

    def listener(run: Run) -> Quiet:
        runs.append(run)
        return quiet

    result = train(config, resume=resume, stop=stop or threading.Event(), listener=listener, log=quiet.log)
    return result, quiet, runs
