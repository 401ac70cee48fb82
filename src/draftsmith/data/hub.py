"""What a name of training data stands for: a file, a folder of files, or a data set on the Hugging Face hub.

A folder or data set has splits and configurations; which files belong to which is read from the `configs` of its
README (the hub's own convention) or else from the files' names. `name:split` or `name:config/split` chooses.
"""

import json
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from draftsmith.embedded import CONVERSATIONS
from draftsmith.errors import NOT_YAML, InputError
from draftsmith.files import is_inside
from draftsmith.hub_names import is_hub_name, pinned

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".feather")
NO_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "manifest.json")
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test",
          "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"}  # fmt: skip
MANIFEST, UNFINISHED, SHARDS = "manifest.json", "preparing.json", "shards"  # of a folder of `data prepare`


def is_prepared(name: str) -> bool:
    """Whether a name of training data is a folder that `data prepare` finished."""
    return (Path(name) / MANIFEST).is_file() and (Path(name) / SHARDS).is_dir()


def find_files(name: str, key: str = "data.train") -> list[tuple[str, Path]]:
    """Files with the names to show for them, in a fixed order.

    Raises:
        InputError: there is no such file, folder or data set, or it does not say which of its files are meant.
    """
    if name == "demo":
        return [(name, CONVERSATIONS)]
    if not name.strip():  # a path of that name is the folder one is in: an unset variable of a shell
        raise InputError(f"{key}: a name is empty; give a file, a folder or a data set")
    if Path(name).is_file():
        return [(name, Path(name))]
    place, _, chosen = name.partition(":")
    folder = Path(place)
    if not folder.is_dir():
        if not may_be_hub(name):
            return [(name, Path(name))]  # reading it says what is wrong
        folder = _download(place, chosen, key)
    if is_prepared(place):
        raise InputError(f"{key}: {place} is prepared data already; `train` takes it as it is")
    if (folder / UNFINISHED).is_file():
        raise InputError(f"{key}: {place} is not finished; run the same `draftsmith data prepare` again")
    files = _files_of(folder, place, chosen, key)
    return [(f"{place}/{path.relative_to(folder).as_posix()}", path) for path in files]


def may_be_hub(name: str) -> bool:
    """Whether a name that is no file or folder here can be a data set on the hub."""
    place = name.partition(":")[0]
    return is_hub_name(place) and not _is_data(place)


def _is_data(name: str) -> bool:
    path = PurePosixPath(name.removesuffix(".gz"))
    return path.suffix in SUFFIXES and path.name not in NO_DATA


def _files_of(folder: Path, name: str, chosen: str, key: str) -> list[Path]:
    """Data files of a folder: saved by `datasets`, or laid out as on the hub."""
    if (folder / "dataset_dict.json").is_file():
        splits = _names_in(folder / "dataset_dict.json", lambda data: data["splits"], key)
        return _files_of(folder / _one_of("split", splits, chosen or "train", name, key), name, "", key)
    if (folder / "state.json").is_file():
        files = _names_in(folder / "state.json", lambda data: [file["filename"] for file in data["_data_files"]], key)
        return [folder / file for file in files]
    inside = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    return [folder / path for path in choose_files(inside, text, chosen, name, key)]


def _names_in(path: Path, find: Callable[[Any], list[str]], key: str) -> list[str]:
    """Names that a note of `datasets` gives, all of them inside its folder.

    Raises:
        InputError: it is damaged, or names something elsewhere.
    """
    try:
        names = list(find(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(f"{key}: {path} cannot be read ({type(error).__name__}: {error}); save it again") from None
    outside = [name for name in names if not is_inside(name)]
    if outside:
        raise InputError(f"{key}: {path} names {outside[0]!r}, which is not inside its folder; save it again")
    return names


def choose_files(paths: Sequence[str], readme: str, chosen: str, name: str, key: str) -> list[str]:
    """The data files of one split.

    Args:
        paths: all files, relative to the data set's root.
        readme: text of its README, "" if there is none.
        chosen: `split`, `config/split`, or "" for `train` of the default configuration.

    Raises:
        InputError: nothing to read, or more than one choice; the choices are named.
    """
    files = [path for path in paths if _is_data(path) and not any(p.startswith(".") for p in path.split("/"))]
    config, _, split = chosen.rpartition("/")
    described = _described(readme)
    if described:
        named = config or ("default" if "default" in described else "")
        files_of = described[_one_of("configuration", list(described), named, name, key)]
        patterns = files_of[_one_of("split", list(files_of), split or "train", name, key)]
        found = [path for path in files if any(fnmatch(path, pattern) for pattern in patterns)]
    else:
        splits = {path: _split_of(path) for path in files}
        wanted = SPLITS.get(split, split) or "train"
        known = any(splits.values())
        found = [path for path in files if (splits[path] == wanted if known else not chosen)]
        if files and not found:
            there = sorted({s for s in splits.values() if s}) or ["files without a split in their names"]
            raise InputError(f"{key}: {name} has no split {split or wanted!r}; it has {', '.join(there)}")
    if not found:
        raise InputError(f"{key}: {name} holds no data file ({', '.join(SUFFIXES)}, .gz of them)")
    return sorted(found)


def _described(readme: str) -> dict[str, dict[str, list[str]]]:
    """The README's `configs`: configuration -> split -> patterns of paths."""
    head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", readme, re.DOTALL)
    try:
        card = yaml.safe_load(head[1]) if head else None
    except NOT_YAML:
        card = None
    configs = card.get("configs") if isinstance(card, dict) else None
    found: dict[str, dict[str, list[str]]] = {}
    for config in configs if isinstance(configs, list) else []:
        if not isinstance(config, dict):
            continue
        files = config.get("data_files")
        entries: list[Any] = files if isinstance(files, list) else [files]
        splits = found.setdefault(str(config.get("config_name", "default")), {})
        for entry in entries:
            split, path = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
            patterns = path if isinstance(path, list) else [path]
            splits.setdefault(str(split), []).extend(p for p in patterns if isinstance(p, str) and p)
    return {name: splits for name, splits in found.items() if any(splits.values())}


def _split_of(path: str) -> str | None:
    """The split that a path's words name, the last one counting."""
    words = [word for word in re.split(r"[^A-Za-z]+", path.lower()) if word in SPLITS]
    return SPLITS[words[-1]] if words else None


def _one_of(what: str, there: Sequence[str], wanted: str, name: str, key: str) -> str:
    if wanted in there:
        return wanted
    if not wanted and len(there) == 1:
        return there[0]
    how = f"{name}:{'CONFIG/SPLIT' if what == 'configuration' else 'SPLIT'}"
    raise InputError(f"{key}: {name} has no {what} {wanted or 'by default'}; choose one with {how}: {', '.join(there)}")


def _download(name: str, chosen: str, key: str) -> Path:
    """The chosen files of a hub data set, in the hub's cache; what is there already is not fetched again."""
    repo, revision = pinned(name)
    fetch = partial(snapshot_download, repo, repo_type="dataset", revision=revision)
    try:
        try:
            inside = HfApi().list_repo_files(repo, repo_type="dataset", revision=revision)
            card = fetch(allow_patterns=["README.md", *NO_DATA])
            readme = Path(card) / "README.md"
            text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
            saved = any(path.endswith("state.json") for path in inside)
            wanted = ["*"] if saved else choose_files(inside, text, chosen, name, key)
            return Path(fetch(allow_patterns=["README.md", *wanted]))
        except (ConnectionError, OSError) as error:
            if isinstance(error, RepositoryNotFoundError):
                raise
            return Path(fetch(local_files_only=True))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"{key}: {name} is neither a file nor a folder, and the hub says: {first}") from error
