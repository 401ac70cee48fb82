"""A name stands for a file, a folder or a hub data set; which split is meant is said or asked for, never guessed."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from draftsmith.data import hub
from draftsmith.data.hub import choose_files, find_files, may_be_hub
from draftsmith.errors import InputError

README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: [data/test-*, more/*.jsonl]
- config_name: german
  data_files: de/*.parquet
---
# A data set
"""


def folder(root: Path, *paths: str, readme: str = "") -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text('{"text": "x"}\n')
    if readme:
        (root / "README.md").write_text(readme)
    return root


def names(name: str) -> list[str]:
    return [shown for shown, _ in find_files(name)]


def test_files_are_themselves(tmp_path: Path) -> None:
    path = folder(tmp_path, "a:b/c.jsonl") / "a:b/c.jsonl"
    assert find_files(str(path)) == [(str(path), path)]
    assert names("none.jsonl") == ["none.jsonl"]


def test_a_folder_gives_its_training_files_in_order(tmp_path: Path) -> None:
    root = str(folder(tmp_path, "train-00001.parquet", "train-00000.parquet", "test.jsonl", "notes.txt", ".git/x.json"))
    assert names(root) == [f"{root}/train-00000.parquet", f"{root}/train-00001.parquet"]
    assert names(f"{root}:test") == [f"{root}/test.jsonl"]
    with pytest.raises(InputError, match=rf"data\.train: {root} has no split 'dev'; it has test, train"):
        names(f"{root}:dev")


def test_a_folder_without_splits_gives_everything(tmp_path: Path) -> None:
    root = str(folder(tmp_path, "b.jsonl.gz", "a.json", "inner/c.jsonl", "dataset_infos.json"))
    assert names(root) == [f"{root}/a.json", f"{root}/b.jsonl.gz", f"{root}/inner/c.jsonl"]
    with pytest.raises(InputError, match="has no split 'train'; it has files without a split"):
        names(f"{root}:train")
    with pytest.raises(InputError, match=r"holds no data file \(\.jsonl"):
        names(str(folder(tmp_path / "empty", "x.txt")))


def test_the_readme_says_which_files_belong_to_what(tmp_path: Path) -> None:
    paths = ["data/train-0.parquet", "data/test-0.parquet", "more/x.jsonl", "de/a.parquet"]
    root = str(folder(tmp_path, *paths, readme=README))
    assert names(root) == [f"{root}/data/train-0.parquet"]
    assert names(f"{root}:test") == [f"{root}/data/test-0.parquet", f"{root}/more/x.jsonl"]
    assert names(f"{root}:german/train") == [f"{root}/de/a.parquet"]
    with pytest.raises(InputError, match=r"no configuration french; choose one with .*CONFIG/SPLIT: default, german"):
        names(f"{root}:french/train")
    with pytest.raises(InputError, match=r"has no split dev; choose one with .*:SPLIT: train, test"):
        names(f"{root}:dev")


def test_several_configurations_without_a_default_must_be_chosen() -> None:
    readme = README.replace("config_name: default", "config_name: english")
    with pytest.raises(InputError, match=r"no configuration by default; choose one with .*: english, german"):
        choose_files(["data/train-0.parquet"], readme, "", "x/y", "data.train")


@pytest.mark.parametrize("readme", ["", "---\nconfigs: 3\n---\n", "---\n: [\n---\n", "no head"])
def test_a_readme_without_configs_says_nothing(readme: str) -> None:
    assert choose_files(["a.jsonl"], readme, "", "x/y", "data.train") == ["a.jsonl"]


def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    """The layout of `save_to_disk`: Arrow streams listed in state.json, splits in dataset_dict.json."""
    table = pa.table({"text": ["one", "two"]})
    for split in ("train", "validation"):
        inner = tmp_path / split
        inner.mkdir()
        with pa.ipc.new_stream(str(inner / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table)
        (inner / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
        (inner / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    assert names(str(tmp_path)) == [f"{tmp_path}/train/data-00000-of-00001.arrow"]
    assert names(f"{tmp_path}:validation") == [f"{tmp_path}/validation/data-00000-of-00001.arrow"]
    from draftsmith.data.conversations import read_conversations

    assert [getattr(item, "text", None) for item in read_conversations([str(tmp_path / "train")])] == ["one", "two"]


def test_what_looks_like_a_hub_id_is_asked_for_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert may_be_hub("owner/name:test")
    assert not any(map(may_be_hub, ["data/x.jsonl", "./owner/name", "/owner/name", "name", "a/b/c"]))
    remote = folder(tmp_path / "remote", "data/train-0.parquet", "data/test-0.parquet", "more/x.jsonl", readme=README)
    asked: list[list[str]] = []

    def download(repo: str, *, repo_type: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repo, repo_type, revision) == ("owner/name", "dataset", None)
        asked.append(allow_patterns)
        return str(remote)

    listing = ["README.md", "data/train-0.parquet", "data/test-0.parquet", "more/x.jsonl"]
    monkeypatch.setattr(hub.HfApi, "list_repo_files", lambda self, repo, repo_type, revision: listing)
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert find_files("owner/name:test") == [
        ("owner/name/data/test-0.parquet", remote / "data/test-0.parquet"),
        ("owner/name/more/x.jsonl", remote / "more/x.jsonl"),
    ]
    assert asked[-1] == ["README.md", "data/test-0.parquet", "more/x.jsonl"], "only what is needed is fetched"


def test_without_the_hub_the_cache_is_used_and_a_missing_data_set_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> list[str]:
        raise ConnectionError("no route")

    def local(repo: str, **how: object) -> str:
        assert how["local_files_only"]
        raise FileNotFoundError("not in the cache")

    monkeypatch.setattr(hub.HfApi, "list_repo_files", away)
    monkeypatch.setattr(hub, "snapshot_download", local)
    with pytest.raises(InputError, match=r"data\.train: owner/name is neither a file nor a folder, .*not in the cache"):
        find_files("owner/name")
