"""What a stranger's files can do: nothing but be read, or be refused in one line."""

import ast
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from conftest import tiny_drafter
from draftsmith import cli, embedded
from draftsmith.compile import carry, private
from draftsmith.compile.cache import CacheError
from draftsmith.data.hub import find_files
from draftsmith.data.rendered import Rendered
from draftsmith.data.shards import Shard, read_manifest, write_shard
from draftsmith.data.template import Document, Renderer
from draftsmith.drafter.checkpoint import find_drafter, load_drafter, save_drafter
from draftsmith.errors import InputError
from draftsmith.files import is_inside
from draftsmith.target.load import TargetSpec

SOURCE = Path(cli.__file__).parent
CPU = torch.device("cpu")

# Called by their last name: what reads pickles, runs text as code, or hands text to a shell.
FORBIDDEN = {"eval", "exec", "system", "popen", "loads", "load", "Unpickler", "unsafe_load", "full_load", "load_module"}
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "pty", "torch.package"}
SAFE_LOADS = {"json.loads", "json.load", "safetensors.torch.load"}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            yield from (f"import {name}" for name in names & MODULES)
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        last = name.rpartition(".")[2]
        is_method = name.endswith(".eval") and not node.args  # of a model
        if last in FORBIDDEN and name not in SAFE_LOADS and not is_method:
            yield name
        for keyword in node.keywords:
            if keyword.arg in ("shell", "allow_pickle", "weights_only") and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is (keyword.arg == "weights_only")
            ):
                yield f"{name}({keyword.arg}=...)"
            if keyword.arg == "trust_remote_code" and isinstance(keyword.value, ast.Constant):
                yield f"{name}(trust_remote_code=...)"


def test_nothing_in_the_package_reads_pickles_or_runs_text() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {danger}"
        for path in SOURCE.rglob("*.py")
        for danger in _dangers(ast.parse(path.read_text()))
    }
    assert found == set()


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from torch.package import x", "torch.load(f)", "np.load(f, allow_pickle=True)", "eval('1')",
     "yaml.load(f)", "yaml.unsafe_load(f)", "exec(code)", "os.system('x')", "subprocess.run(x, shell=True)",
     "f(trust_remote_code=True)", "torch.load(f, weights_only=False)"],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert list(_dangers(ast.parse(text)))


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A copy of the embedded target."""
    return Path(shutil.copytree(embedded.TARGET, tmp_path / "target"))


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path / "the pickle ran")


def plant(path: Path, trap: Trap) -> None:
    torch.save({"weight": trap}, path)
    torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
    assert trap.path.exists(), "a trap that does not work proves nothing"
    trap.path.unlink()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_in_a_targets_folder_is_refused(name: str, target: Path, trap: Trap) -> None:
    for weights in target.glob("*.safetensors"):
        weights.unlink()
    plant(target / name, trap)
    with pytest.raises(InputError, match=rf"its weights are in {name}, a pickle, .* save them as safetensors"):
        TargetSpec(str(target)).model_with_adapter(torch.float32)
    assert not trap.path.exists()


def test_a_pickle_beside_safetensors_is_not_looked_at(target: Path, trap: Trap) -> None:
    plant(target / "pytorch_model.bin", trap)
    plant(target / "training_args.bin", trap)
    TargetSpec(str(target)).model_with_adapter(torch.float32)
    assert not trap.path.exists()


def test_a_pickle_as_adapter_is_refused(target: Path, tmp_path: Path, trap: Trap) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]})
    )
    plant(adapter / "adapter_model.bin", trap)
    with pytest.raises(InputError, match=r"target.adapter '.*': its weights are in adapter_model.bin, a pickle"):
        TargetSpec(str(target), adapter=str(adapter)).model_with_adapter(torch.float32)
    assert not trap.path.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "mask_embedding.pt"])
def test_a_pickle_in_a_draft_folder_is_not_opened(name: str, tmp_path: Path, trap: Trap) -> None:
    save_drafter(tmp_path / "draft", tiny_drafter(), dtype=torch.float32, provenance={}, card="")
    if name == "pytorch_model.bin":
        (tmp_path / "draft" / "model.safetensors").unlink()
    plant(tmp_path / "draft" / name, trap)
    with pytest.raises(InputError):
        load_drafter(tmp_path / "draft", CPU)
    assert not trap.path.exists()


REMOTE = """
from pathlib import Path
Path({path!r}).touch()
from transformers import Qwen3Config, Qwen3ForCausalLM
class OwnConfig(Qwen3Config):
    model_type = "own"
class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_target_runs_only_if_asked_for(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every command that reads the target; asked for, it does run, so the trap is a trap."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    ran = tmp_path / "the code ran"
    (target / "own.py").write_text(REMOTE.format(path=str(ran)))
    config = json.loads((target / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (target / "config.json").write_text(json.dumps(config))
    run = tmp_path / "run.yaml"
    run.write_text(
        yaml.safe_dump(
            {"run": {"dir": str(tmp_path / "r")}, "target": {"model": str(target)}, "data": {"train": ["demo"]}}
        )
    )
    save_drafter(tmp_path / "draft", tiny_drafter(), dtype=torch.float32, provenance={}, card="")
    for arguments in (
        ["train", str(run)],
        ["train", str(run), "--plan"],
        ["export", str(tmp_path / "draft"), "--to", "speculators", str(tmp_path / "o"), "--target", str(target)],
        ["init", "--target", str(target), "--data", "demo", "--out", str(tmp_path / "init.yaml")],
    ):
        assert cli.main(arguments) == 1, arguments
        shown = capsys.readouterr().err
        assert "brings code of its own" in shown
        assert "set target.trust_remote_code to true" in shown
        assert shown.count("\n") == 1
        assert not ran.exists()
    assert TargetSpec(str(target), trust_remote_code=True).config().hidden_size == config["hidden_size"]
    assert ran.exists()


class Hub(BaseHTTPRequestHandler):
    """A hub that knows nothing and remembers what it was asked."""

    asked: list[str]

    def log_message(self, format: str, *given: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RevisionNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET


ASK = """
from draftsmith.target.load import TargetSpec, merge_adapter
from draftsmith.drafter.checkpoint import find_drafter
from draftsmith.data.hub import find_files
from contextlib import suppress
from draftsmith.errors import InputError
spec = TargetSpec("own/model", "my-revision")
for ask in (spec.config, spec.tokenizer, lambda: spec.model_with_adapter("auto"),
            lambda: merge_adapter(None, "own/lora@rev-a"), lambda: find_drafter("own/draft@rev-d"),
            lambda: find_files("own/data@rev-s:train")):
    with suppress(InputError):
        ask()
"""


def test_revisions_reach_every_download(tmp_path: Path) -> None:
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Hub,), {"asked": asked}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }
    try:
        done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=120)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    for repository, revision in {
        "own/model": "my-revision",
        "own/lora": "rev-a",
        "own/draft": "rev-d",
        "own/data": "rev-s",
    }.items():
        paths = [path for path in asked if repository in path]
        assert paths, repository
        assert all(revision in path for path in paths), paths
    assert not any("main" in path for path in asked)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "", "a\0b", "..\\x", 7, None])
def test_names_that_lead_elsewhere(name: object) -> None:
    assert not is_inside(name)
    assert is_inside("a/b.arrow")


def test_an_index_of_weights_stays_in_its_folder(target: Path, tmp_path: Path) -> None:
    (weights,) = target.glob("*.safetensors")
    weights.rename(tmp_path / "elsewhere.safetensors")
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(InputError, match=r"index.json names '../elsewhere.safetensors', which is not inside"):
        TargetSpec(str(target)).model_with_adapter(torch.float32)
    index.write_text("{")
    with pytest.raises(InputError, match=r"index.json cannot be read"):
        TargetSpec(str(target)).model_with_adapter(torch.float32)


def test_prepared_data_stays_in_its_folder(tmp_path: Path) -> None:
    manifest = {"format": "draftsmith data 1", "rendering_key": "k", "template_settings": {}}
    (tmp_path / "manifest.json").write_text(
        json.dumps(manifest | {"shards": [{"name": "../../secret.arrow", "sha256": "x"}]})
    )
    with pytest.raises(InputError, match=r"shards\[0\] is '../../secret.arrow', which is not inside the folder"):
        read_manifest(tmp_path)


def test_a_shards_offsets_are_not_followed_out_of_it(tmp_path: Path) -> None:
    """Its checksum can be made to fit; numpy would read whatever lies behind it."""
    document = Document(np.arange(4, dtype=np.int32), np.ones(4, np.bool_))
    item = Rendered("f", 1, "00" * 32, True, (document, document))
    write_shard(tmp_path / "s.arrow", "f", [item])
    whole, offsets = (tmp_path / "s.arrow").read_bytes(), struct.pack("<3i", 0, 4, 8)
    assert whole.count(offsets) == 2
    (tmp_path / "s.arrow").write_bytes(whole.replace(offsets, struct.pack("<3i", 0, 4, 2**20)))
    with pytest.raises(InputError, match="is damaged"):
        Shard(tmp_path / "s.arrow")


@pytest.mark.parametrize(
    ("note", "content"),
    [
        ("dataset_dict.json", {"splits": ["../outside"]}),
        ("state.json", {"_data_files": [{"filename": "/etc/passwd"}]}),
        ("state.json", {"_data_files": [{"filename": "../outside.arrow"}]}),
    ],
)
def test_a_data_sets_notes_stay_in_its_folder(note: str, content: Any, tmp_path: Path) -> None:
    (tmp_path / note).write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"names '.*', which is not inside its folder"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"splits": 7, "_data_files": [7]}', "[" * 5000])
@pytest.mark.parametrize("note", ["dataset_dict.json", "state.json"])
def test_a_data_sets_damaged_notes_are_named(note: str, content: str, tmp_path: Path) -> None:
    (tmp_path / note).write_text(content)
    with pytest.raises(InputError, match=rf"{note} cannot be read"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("configs", ["[7]", "[{data_files: 7}]", "[{data_files: [{split: a}]}]", "2026-99-99", "{"])
def test_a_data_sets_strange_card_is_passed_over(configs: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert [path.name for _, path in find_files(str(tmp_path))] == ["train.jsonl"]


@pytest.mark.parametrize("key", ["../../outside", "/tmp/outside.best_config"])
def test_a_packed_cache_stays_in_the_cache(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    key = key.replace("/tmp", str(tmp_path))
    artifacts = private.make_artifacts([("autotune", key, {"planted": 1})])
    assert artifacts is not None
    packed = tmp_path / "packed"
    manifest = {"format": carry.FORMAT, "torch": torch.__version__, "devices": ["x"], "entries": 1}
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        archive.writestr("stamps.json", "[]")
        archive.writestr("artifacts", artifacts)
    with pytest.raises(CacheError, match=r"would not be inside the cache; do not use it"):
        carry.unpack(packed)
    assert not list(tmp_path.rglob("outside*"))


def test_chat_templates_run_in_jinjas_sandbox(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.TARGET)
    assert isinstance(_compile_jinja_template("x").environment, ImmutableSandboxedEnvironment)
    for attack in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('" + str(tmp_path / "planted") + "', 'w') }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ):
        tokenizer.chat_template = attack
        renderer = Renderer(tokenizer)
        with pytest.raises(InputError, match="the chat template refuses it"):
            renderer.prompt_ids(_question())
    assert not (tmp_path / "planted").exists()


def _question() -> Any:
    from draftsmith.data.conversations import Prompt

    return Prompt(({"role": "user", "content": "Q"},))


def test_a_hub_name_may_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def download(name: str, **how: Any) -> str:
        seen.append((name, how["revision"]))
        return "/nowhere"

    monkeypatch.setattr("draftsmith.drafter.checkpoint.snapshot_download", download)
    find_drafter("a/b@c0ffee")
    find_drafter("a/b")
    assert seen == [("a/b", "c0ffee"), ("a/b", None)]
