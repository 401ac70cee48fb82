"""The cache directory: damage is set aside and compiled once more; who wrote what is on record; one file travels."""

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import cli
from draftsmith.compile import cache, carry, private
from draftsmith.compile.cache import (
    UNKNOWN,
    CacheError,
    CompilerCache,
    survey,
)
from draftsmith.compile.damage import JOURNAL, content_name, find_damage, find_unreadable, named_by
from draftsmith.compile.guard import Compiled, Guard, process_guard
from draftsmith.compile.journal import Stamp, append_stamps, read_stamps

# 1,000 bytes, the last 64 of them the table of one section
LIBRARY = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack("<Q", 936).ljust(18, b"\0") + struct.pack("<2H", 64, 1)
LIBRARY = LIBRARY.ljust(1000, b"\0")


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compiled without the C++ compiler."""
    return x @ y


def wave(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compiled with it."""
    return torch.sin(x) * y


def pair(n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(n)
    return torch.randn(n, n), torch.randn(n, n)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory of this test's own, as the compiler sees it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    yield private.cache_directory()
    private.forget_loaded()
    process_guard().cache = CompilerCache()


def start(function: Callable[..., Any], **options: Any) -> tuple[Guard, Compiled]:
    """What a new process would have: the guard has seen nothing of the directory, and nothing of it is loaded."""
    guard = process_guard()
    guard.install()
    private.forget_loaded()
    guard.cache = CompilerCache()
    guard.compilations.clear()
    return guard, guard.compile(function, **options)


def replace(path: Path, content: bytes) -> None:
    """A new file at the place: the old one may be mapped into this process."""
    path.unlink()
    path.write_bytes(content)


def some(directory: Path, pattern: str) -> Path:
    found = sorted(directory.glob(pattern))
    assert found, pattern
    return found[0]


# -- finding damage


@pytest.mark.parametrize(
    ("name", "content", "trouble"),
    [
        ("kernel.so", b"", "is empty"),
        ("kernel.so", LIBRARY[:40], "cut short at 40 bytes"),
        ("kernel.so", LIBRARY[:-1], "cut short: 999 of 1000 bytes"),
        ("kernel.so", b"<html>" * 100, "not a library"),
        ("graph.py", b"", "is empty"),
        ("graph.py", b"# AOT ID: ['0_inference']\nimport torch\n", "cut short or changed"),
        ("kernel.py", b"def kernel(:\n", "does not parse"),
        ("kernel.py", b"x = 1\0", "does not parse"),
        ("kernel.so", LIBRARY, None),
        ("kernel.py", b"import triton\n", None),  # a kernel whose name holds more than its content
        ("note.txt", b"", None),
    ],
)
def test_broken_files_are_found(tmp_path: Path, name: str, content: bytes, trouble: str | None) -> None:
    path = tmp_path / "ab" / name
    path.parent.mkdir()
    path.write_bytes(content)
    found = find_damage(tmp_path)
    assert len(found) == (trouble is not None)
    if trouble:
        (line,) = found
        assert line.startswith(f"{path}: ")
        assert pytest.RaisesExc(ValueError, match=trouble).matches(ValueError(line))


def test_a_file_that_is_being_built_is_not_damaged(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "cabc.main.so").write_bytes(b"\x7fELF")
    with (tmp_path / "locks" / "cabc.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert find_damage(tmp_path) == []
    assert len(find_damage(tmp_path)) == 1


def test_only_the_loader_is_believed(tmp_path: Path) -> None:
    broken = ImportError(f"{tmp_path}/ab/k.so: undefined symbol: _Zz")
    failed = RuntimeError("backend failed")
    failed.__cause__ = broken
    assert named_by(failed, tmp_path) == [str(broken)]
    assert named_by(OSError(f"{tmp_path}/ab/k.so: invalid ELF header"), tmp_path)
    assert named_by(SyntaxError("invalid syntax", (str(tmp_path / "k.py"), 1, 1, "(")), tmp_path)
    assert named_by(OSError(28, "No space left on device", f"{tmp_path}/ab/k.so"), tmp_path) == []
    assert named_by(ImportError("libgomp.so.1: cannot open shared object file"), tmp_path) == []
    assert named_by(RuntimeError(f"{tmp_path}/ab/k.cpp: error"), tmp_path) == []


# -- the guard and damage


def test_a_damaged_cache_is_set_aside_before_it_is_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard, compiled = start(product)
    compiled(*pair())
    assert find_damage(directory) == []
    graph = some(directory, "??/c*.py")
    text = graph.read_bytes()
    replace(graph, text[: text.index(b"\n", len(text) // 2)])  # at the end of a line: it may well parse

    guard, compiled = start(product)
    assert torch.equal(compiled(*pair()), product(*pair()))
    (aside,) = guard.cache.set_aside
    assert aside.kept_as == directory.with_name("cache.damaged")
    assert (aside.kept_as / graph.relative_to(directory)).exists()
    assert str(graph) in caplog.text
    assert "compiled again" in caplog.text
    assert [c.cache for c in guard.compilations] == ["miss"]

    guard, compiled = start(product)
    compiled(*pair())
    assert guard.cache.set_aside == []
    assert [c.cache for c in guard.compilations] == ["hit"]


def test_what_breaks_later_is_compiled_once_more(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard, compiled = start(product)
    compiled(*pair())
    graph = some(directory, "??/c*.py")
    text = graph.read_bytes()
    replace(graph, text[: text.index(b"\n", 200)])  # it loads, and lacks what should be called
    directory.with_name("cache.damaged").mkdir()  # of an earlier time; nothing is written over
    private.forget_loaded()
    again = guard.compile(product)  # the guard has examined the directory already
    assert torch.equal(again(*pair()), product(*pair()))
    (aside,) = guard.cache.set_aside
    assert aside.kept_as == directory.with_name("cache.damaged-2")
    assert "cut short or changed" in caplog.text
    assert [c.cache for c in guard.compilations] == ["miss", "miss"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1000])
def test_a_library_that_breaks_is_compiled_once_more(directory: Path, size: int) -> None:
    start(wave)[1](*pair())
    library = some(directory, "??/*.main.so")
    replace(library, library.read_bytes()[:size])
    guard, compiled = start(wave)
    assert torch.allclose(compiled(*pair()), wave(*pair()))
    (aside,) = guard.cache.set_aside
    assert len(aside.evidence) == 1
    assert aside.evidence[0].startswith(str(library))
    assert find_damage(directory) == []


def test_a_cache_that_cannot_be_set_aside_is_said(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == directory:
            raise PermissionError(13, "Permission denied", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    (directory / "ab").mkdir(parents=True)
    (directory / "ab" / "cabc.so").write_bytes(b"")
    guard, compiled = start(product)
    assert torch.equal(compiled(*pair()), product(*pair()))
    assert guard.cache.set_aside == []
    assert "stays where it is" in caplog.text
    assert "Permission denied" in caplog.text


def test_errors_of_the_function_never_touch_the_cache(directory: Path) -> None:
    """Neither while it is traced nor while it runs nor in a backend of the user's, even beside real damage."""

    @torch.library.custom_op("draftsmith_tests::burn", mutates_args=())
    def burn(x: torch.Tensor) -> torch.Tensor:
        raise OSError(f"{directory}/ab/k.so: file too short")

    burn.register_fake(lambda x: torch.empty_like(x))
    tries = []

    def backend(graph: Any, inputs: Any) -> Any:
        tries.append(graph)
        raise ValueError("no such backend")

    guard, compiled = start(product)
    compiled(*pair())
    with pytest.raises(RuntimeError, match="no such backend"):
        guard.compile(product, backend=backend)(*pair())
    assert len(tries) == 1
    (directory / "ab").mkdir(exist_ok=True)
    (directory / "ab" / "cabc.so").write_bytes(b"")
    with pytest.raises(OSError, match="file too short"):
        guard.compile(lambda x: burn(x))(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"(?i)data-dependent"):
        guard.compile(lambda x: x + 1 if x.sum() > 0 else x)(torch.ones(3))
    assert guard.cache.set_aside == []
    assert directory.exists()


def test_a_directory_that_another_process_set_aside_is_not_set_aside_again(directory: Path) -> None:
    directory.mkdir()
    tries = []

    def backend(graph: Any, inputs: Any) -> Any:
        tries.append(graph)
        if len(tries) == 1:
            directory.rename(directory.with_name("cache.damaged"))
            directory.mkdir()
            raise AttributeError("module has no attribute 'call'")
        return graph.forward

    guard, compiled = start(product, backend=backend)
    assert torch.equal(compiled(*pair()), product(*pair()))
    assert len(tries) == 2
    assert guard.cache.set_aside == []
    assert cache.damaged_siblings(directory) == [directory.with_name("cache.damaged")]


@pytest.mark.slow
def test_a_cut_library_kills_a_naive_process_and_not_a_guarded_one(directory: Path) -> None:
    """SIGBUS while the library is loaded: no exception could be caught."""
    start(wave)[1](*pair())
    library = some(directory, "??/*.main.so")
    replace(library, library.read_bytes()[:1000])
    naive = f"import torch; torch.compile(lambda x, y: torch.sin(x) * y, fullgraph=True, dynamic=False)(*{INPUTS})"
    guarded = (
        naive.replace("import torch;", "import torch; from draftsmith.compile import guard;")
        .replace("torch.compile", "guard.compile")
        .replace("fullgraph=True, ", "")
    )
    source = Path(cache.__file__).parents[2]
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(source)}, capture_output=True, text=True
        )
        for code in (naive, guarded, naive)
    ]
    assert [run.returncode for run in runs] == [-7, 0, 0], runs
    assert "set aside" in runs[1].stderr


INPUTS = "(torch.zeros(4, 4), torch.ones(4, 4))"


# -- who wrote what


def test_what_was_compiled_is_on_record(directory: Path) -> None:
    assert survey(directory).kinds == ()
    guard, compiled = start(product)
    compiled(*pair(4))
    compiled(*pair(5))
    found = survey(directory)
    (writer,) = found.writers
    assert (writer.torch, writer.device) == (torch.__version__, cache.device_name())
    assert writer.graphs == len(cache.entries(directory)) == 4  # two graphs, each with autograd's wrapper
    assert [(cost.name, cost.signature) for cost in found.costs] == [
        ("product", "float32[4, 4]@cpu, float32[4, 4]@cpu"),
        ("product", "float32[5, 5]@cpu, float32[5, 5]@cpu"),
    ]
    assert found.compile_s == pytest.approx(sum(c.seconds for c in guard.compilations))
    assert {"graph entries", "autograd entries", "generated Python"} <= {kind.name for kind in found.kinds}
    assert found.nbytes == sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    assert found.damage == found.unreadable == ()

    start(product)[1](*pair(4))  # a hit writes nothing
    assert len(read_stamps(directory)) == 2
    (directory / JOURNAL).unlink()
    (unknown,) = survey(directory).writers
    assert (unknown.torch, unknown.device, unknown.graphs) == (UNKNOWN, UNKNOWN, 4)


def stamp(**changes: Any) -> Stamp:
    values = {"when_s": 1.0, "torch": torch.__version__, "device": "cpu", "name": "f", "signature": "s", "seconds": 2.0}
    return Stamp(**(values | {"keys": ("inductor/k",)} | changes))


def test_a_torn_journal_line_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append_stamps(tmp_path, [stamp()])
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"when_s": 2.0, "tor\n{"other": 1}\n')
    append_stamps(tmp_path, [stamp(seconds=3.0)])
    assert read_stamps(tmp_path) == [stamp(), stamp(seconds=3.0)]
    assert "2 lines cannot be read" in caplog.text
    assert [cost.seconds for cost in survey(tmp_path).costs] == [3.0]  # of one signature, the last


# -- one file that travels


def test_a_packed_cache_is_hit_elsewhere(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(product)[1](*pair())
    tuning = directory / "zz" / f"{'a' * 64}.best_config"
    tuning.parent.mkdir(exist_ok=True)
    tuning.write_text('{"XBLOCK": 8}')
    damaged = some(directory, "fxgraph/*/*/*").parent / "damaged"
    damaged.write_bytes(b"no longer what it was")
    assert find_unreadable(directory) == [f"{damaged}: is not what was written"]
    packed = carry.pack(tmp_path / "cache.pack")
    assert (packed.entries, packed.unreadable, packed.other_torch) == (3, 1, 0)
    assert packed.devices == (cache.device_name(),)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    unpacked = carry.unpack(tmp_path / "cache.pack")
    carry.unpack(tmp_path / "cache.pack")  # twice is once
    assert (unpacked.entries, unpacked.is_foreign) == (3, False)
    elsewhere = private.cache_directory()
    assert json.loads((elsewhere / tuning.relative_to(directory)).read_text()) == {"XBLOCK": 8}
    assert survey(elsewhere).costs == survey(directory).costs
    assert [writer.device for writer in survey(elsewhere).writers] == [cache.device_name()]
    guard, compiled = start(product)
    assert torch.equal(compiled(*pair()), product(*pair()))
    assert [c.cache for c in guard.compilations] == ["hit"]


def test_entries_of_another_torch_stay_behind(directory: Path, tmp_path: Path) -> None:
    directory.mkdir()
    with pytest.raises(CacheError, match="holds nothing that torch"):
        carry.pack(tmp_path / "empty.pack")
    for key, writer in (("fours", "1.0"), ("fives", torch.__version__), ("sixes", None)):
        place = directory / "fxgraph" / key[1:3] / key
        place.mkdir(parents=True)
        (place / content_name(key.encode())).write_bytes(key.encode())
        if writer:
            append_stamps(directory, [stamp(torch=writer, device="gpu", keys=(f"inductor/{key}",))])
    packed = carry.pack(tmp_path / "cache.pack")
    assert (packed.entries, packed.other_torch, packed.devices) == (2, 1, ("gpu", UNKNOWN))
    with zipfile.ZipFile(tmp_path / "cache.pack") as archive:
        assert b"fives" in archive.read("artifacts")
        assert b"fours" not in archive.read("artifacts")
        assert [line["torch"] for line in json.loads(archive.read("stamps.json"))] == [torch.__version__]
    with pytest.raises(CacheError, match="exists"):
        carry.pack(tmp_path / "cache.pack")


def write_pack(path: Path, artifacts: bytes = b"", **changes: Any) -> None:
    manifest = {"format": carry.FORMAT, "torch": torch.__version__, "devices": ["cpu"], "entries": 1} | changes
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        archive.writestr("stamps.json", "[]")
        archive.writestr("artifacts", artifacts)


def test_what_cannot_be_unpacked_is_refused(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache.pack"
    with pytest.raises(CacheError, match="No such file"):
        carry.unpack(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(CacheError, match="not a packed compiler cache"):
        carry.unpack(path)
    write_pack(path, torch="1.0")
    with pytest.raises(CacheError, match=r"packed by torch 1\.0, this is torch"):
        carry.unpack(path)
    write_pack(path, format=99)
    with pytest.raises(CacheError, match="format 99"):
        carry.unpack(path)
    write_pack(path, artifacts=b"nonsense")
    with pytest.raises(CacheError, match="cannot read"):
        carry.unpack(path)
    write_pack(path, artifacts=private.make_artifacts([("inductor", "fkey", b"no pickle")]) or b"")
    with pytest.raises(CacheError, match="an entry that cannot be read"):
        carry.unpack(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "{}")
    with pytest.raises(CacheError, match="not a packed compiler cache"):
        carry.unpack(path)


# -- clearing, and the command


def fill(directory: Path) -> None:
    place = directory / "aotautograd" / "abcd"
    place.mkdir(parents=True)
    (place / content_name(b"graph")).write_bytes(b"graph")
    (directory / "ab").mkdir()
    (directory / "ab" / "cabc.so").write_bytes(b"")
    append_stamps(directory, [stamp(seconds=61.5)])


def test_clear_waits_for_others_and_spares_what_is_not_the_compilers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(directory)
    shutil.copytree(directory, directory.with_name("cache.damaged"))
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.1)
    with cache.held(directory), pytest.raises(CacheError, match="another process uses"):
        cache.clear(directory)
    (directory / "thesis.txt").write_text("mine")
    with pytest.raises(CacheError, match=r"not made by the compiler: .*thesis\.txt"):
        cache.clear(directory)
    assert len(cache.entries(directory)) == 1
    (directory / "thesis.txt").unlink()
    other = directory.with_name("cache.damaged-by-me")
    other.mkdir()
    cache.clear(directory)
    assert list(directory.iterdir()) == []
    assert not directory.with_name("cache.damaged").exists()
    assert other.exists()


def test_a_compilation_goes_on_without_the_lock(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.1)
    with cache.held(directory, alone=True):
        assert CompilerCache().run(lambda: 7) == 7
    assert "compiling without the lock" in caplog.text
    caplog.clear()
    with cache.held(directory), cache.held(directory):  # two that compile do not meet
        assert CompilerCache().run(lambda: 8) == 8
    assert caplog.text == ""


def test_the_command_tells_and_asks(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> tuple[int, str]:
        code = cli.main(["cache", *words])
        out = capsys.readouterr()
        return code, out.out + out.err

    assert run("info") == (0, f"{directory}\n  empty\n")
    assert run("clear") == (0, f"{directory} is empty; nothing to delete\n")
    fill(directory)
    code, text = run("info")
    assert code == 0
    assert "3 files" in text
    assert "1 graphs written by unknown" in text
    assert "damaged, will be set aside at the next compilation: 1" in text
    assert "cabc.so: is empty" in text
    file = str(tmp_path / "cache.pack")
    code, text = run("pack", file)
    assert code == 0
    assert f"{file}: 1 entries" in text
    assert run("pack", file)[0] == 1
    code, text = run("unpack", file)
    assert code == 0
    assert "1 entries added" in text

    code, text = run("clear")
    assert code == 2
    assert "61.5 s for 1 signature" in text
    assert "f(s)" in text
    assert "for 1 of 1 graphs, which the guard did not compile" in text
    assert "add --yes" in text
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for answer, deleted in (("n", False), ("", False), ("y", True)):
        monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
        assert run("clear")[0] == (0 if deleted else 1)
        assert bool(cache.entries(directory)) is not deleted
    fill(directory.with_name("cache.damaged"))
    code, text = run("clear", "--yes")
    assert code == 0
    assert "cache.damaged, set aside earlier" in text
    assert run("clear") == (0, f"{directory} is empty; nothing to delete\n")


def test_the_cache_is_the_users_own_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cli._compiler_cache() == tmp_path / "caches" / "draftsmith" / "compiler"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    cli.main(["cache", "info"])
    assert capsys.readouterr().out.startswith(f"{tmp_path}/caches/draftsmith/compiler\n")
    assert not (tmp_path / "caches").exists()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    cli.main(["cache", "info"])
    assert capsys.readouterr().out.startswith(f"{tmp_path}/mine\n")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cli._compiler_cache() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/proc/nowhere")
    if os.geteuid() != 0:  # root may write anywhere that os.access can tell
        assert cli._compiler_cache() is None
