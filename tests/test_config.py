"""The config says what is wrong, where, and what to do; what it prints it can read."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith import embedded
from draftsmith.config import Config, Devices, differing_keys, dump_config, load_config
from draftsmith.errors import ConfigError

BASE = "run: {dir: r}\ntarget: {model: demo}\ndata: {train: [demo]}\n"  # three lines
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str = "", *overrides: str, base: str = BASE) -> Config:
    Path("c.yaml").write_text(base + text, encoding="utf-8")
    return load_config(Path("c.yaml"), overrides)


def refusal(text: str = "", *overrides: str, base: str = BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides, base=base)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", [*EXAMPLES, embedded.CONFIG], ids=lambda path: path.name)
def test_every_shipped_config_parses_and_round_trips(path: Path) -> None:
    config = load_config(path)
    Path("again.yaml").write_text(dump_config(config, ["a note: with a colon"]), encoding="utf-8")
    assert load_config(Path("again.yaml")) == config


def test_examples_are_shipped() -> None:
    assert "demo.yaml" in [path.name for path in EXAMPLES]


def test_only_three_keys_are_needed() -> None:
    config = load()
    assert (config.run.dir, config.target.model, config.data.train) == ("r", "demo", ["demo"])
    assert (config.seed, config.topology, config.train.lr) == (0, "auto", 6e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian: {steps: 5}\n", "c.yaml:4: unknown key trian; did you mean train?"),
        ("train:\n  lr: 1\n  step: 5\n", "c.yaml:6: unknown key train.step; did you mean train.steps?"),
        ("steps: 5\n", "c.yaml:4: unknown key steps; did you mean train.steps?"),
        ("train: {block_size: 4}\n", "c.yaml:4: unknown key train.block_size; did you mean drafter.block_size?"),
        (
            "report: {every: 1}\n",
            "c.yaml:4: unknown key report.every; did you mean checkpoint.every or eval.every?",
        ),
        ("train: {layers: 4}\n", "c.yaml:4: unknown key train.layers; did you mean drafter.layers?"),
        ("zzz: 1\n", "c.yaml:4: unknown key zzz; remove it"),
        ("topology: {targets: [a], drafter: [b]}\n", "unknown key topology.targets; did you mean topology.target?"),
        ("on: 1\n", "unknown key True; keys are words"),
        ("7: 1\n", "unknown key 7; keys are words"),
    ],
)
def test_an_unknown_key_names_its_line_and_the_nearest_key(text: str, message: str) -> None:
    assert message in refusal(text)


def test_a_misspelt_section_is_unknown_rather_than_missing() -> None:
    message = refusal(base="run: {dir: r}\ntraget: {model: demo}\ndata: {train: [demo]}\n")
    assert message == "c.yaml:2: unknown key traget; did you mean target?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  lr: 1\n  steps: abc\n", "c.yaml:6: train.steps is 'abc': input should be a valid integer"),
        ("train: {steps: 1.0}\n", "c.yaml:4: train.steps is 1.0: input should be a valid integer"),
        ("train: {steps: 0}\n", "c.yaml:4: train.steps is 0: input should be greater than 0"),
        ("train: {lr: abc}\n", "c.yaml:4: train.lr is 'abc': input should be a valid number"),
        ("train: {lr: yes}\n", "c.yaml:4: train.lr is True: input should be a valid number"),
        ("train: {lr: .inf}\n", "c.yaml:4: train.lr is inf: input should be a finite number"),
        ("train: {lr: nan}\n", "c.yaml:4: train.lr is nan: input should be a finite number"),
        ("train: {warmup: 1.5}\n", "train.warmup is 1.5: input should be less than or equal to 1"),
        ("train: {optimizer: sgd}\n", "train.optimizer is 'sgd': input should be 'adamw' or 'muon'"),
        ("train: 5\n", "c.yaml:4: train is 5: expected keys below it, like train.steps"),
        ("drafter: {block_size: 1}\n", "drafter.block_size is 1: input should be greater than or equal to 2"),
        ("drafter:\n  taps:\n  - 1\n  - x\n", "c.yaml:7: drafter.taps.1 is 'x': input should be a valid integer"),
        ("eval: {prompts: 3}\n", "c.yaml:4: eval.prompts is 3: input should be a valid list"),
        ("seed: -1\n", "seed is -1: input should be greater than or equal to 0"),
        (f"seed: {2**63}\n", "input should be less than"),
        ("topology: 5\n", "c.yaml:4: topology is 5: input should be a valid string"),
        ("topology: {target: [a]}\n", "c.yaml: topology.drafter is missing; add it"),
        ("topology: {target: [a, 1], drafter: [b]}\n", "c.yaml:4: topology.target.1 is 1: input should be a valid"),
        ("report: {tensorboard: 1}\n", "report.tensorboard is 1: input should be a valid boolean"),
    ],
)
def test_a_wrong_value_names_line_key_and_what_is_expected(text: str, message: str) -> None:
    assert message in refusal(text)


def test_a_missing_key_is_named() -> None:
    assert refusal(base="run: {}\ntarget: {model: m}\ndata: {train: [d]}\n") == "c.yaml: run.dir is missing; add it"
    assert refusal(base="run: {dir: r}\n") == "c.yaml: target is missing; add it"
    assert "data.train is []: list should have at least 1 item" in refusal("", "data.train=[]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  rows_per_step: 8\npipeline:\n  target_batch_rows: 3\n",
            "c.yaml:7: pipeline.target_batch_rows 3 does not divide train.rows_per_step 8; choose a divisor",
        ),
        ("drafter: {layer_types: [full_attention]}\n", "c.yaml:4: drafter.layer_types has 1 entries for"),
        (
            "drafter: {layers: 1, layer_types: [sliding_attention]}\n",
            "c.yaml:4: drafter.layer_types has a sliding layer: set drafter.sliding_window",
        ),
    ],
)
def test_contradictions_between_keys(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "0.001", "1.0e-3", "'1e-3'"])
def test_floats_as_people_write_them(number: str) -> None:
    assert load(f"train: {{lr: {number}}}\n").train.lr == 1e-3
    assert load("", f"train.lr={number}").train.lr == 1e-3
    assert load(f"train: {{gamma: {number}}}\n").train.gamma == 1e-3
    assert load(f"data: {{train: [demo], anchor_density: {number}}}\n", base=BASE[: BASE.index("data")]).data


def test_whole_numbers_where_floats_are_meant() -> None:
    config = load("train: {clip: 1, gamma: 5}\n")
    assert (config.train.clip, config.train.gamma) == (1.0, 5.0)
    assert isinstance(config.train.clip, float)


def test_a_string_that_looks_like_a_number_stays_a_string() -> None:
    assert load("", "run.dir='1e-3'").run.dir == "1e-3"


def test_a_section_without_keys_has_its_defaults() -> None:
    assert load("train:\n  # steps: 5\n").train == load().train
    assert load("train:\n", "train.steps=5").train.steps == 5


def test_overrides_are_applied_in_order() -> None:
    config = load("train: {steps: 3}\n", "train.steps=4", "train.steps=5", "data.train=[a, b]", "eval.limit=7")
    assert (config.train.steps, config.data.train, config.eval.limit) == (5, ["a", "b"], 7)
    assert load("", "topology={target: [x], drafter: [y]}").topology == Devices(target=["x"], drafter=["y"])
    assert load("", "run.dir=a=b").run.dir == "a=b"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "--set train.steps: write it as --set section.key=value"),
        ("=5", "--set =5: write it as --set section.key=value"),
        ('run.dir="\\U99999999999"', '--set run.dir="\\U99999999999": the value is not YAML'),
        ("train.lr=[1", "--set train.lr=[1: the value is not YAML"),
        ("run.dir.x=1", "--set run.dir.x=1: dir is not a section"),
        ("train.stepz=1", "--set train.stepz=1: unknown key train.stepz; did you mean train.steps?"),
        ("trian.steps=1", "--set trian.steps=1: unknown key trian; did you mean train?"),
        ("train.steps=abc", "--set train.steps=abc: train.steps is 'abc': input should be a valid integer"),
        ("train=5", "--set train=5: train is 5: expected keys below it"),
    ],
)
def test_a_bad_override_is_named_and_not_the_file(override: str, message: str) -> None:
    assert refusal("train: {steps: 3}\n", "train.lr=1e-3", override).startswith(message)


def test_a_good_override_does_not_hide_the_line_of_another_fault() -> None:
    assert refusal("train: {steps: abc}\n", "train.lr=1e-3").startswith("c.yaml:4: train.steps")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml: expected keys like `run:` and `target:`, found nothing"),
        ("- a\n", "found list"),
        ("a: [\n", "not YAML"),
        ("a: b\n\tc: d\n", "c.yaml:2: not YAML"),
        ("run: *x\n", "c.yaml:1: not YAML: found undefined alias"),
        ("a: \x00\n", "c.yaml: not YAML: unacceptable character"),
        ('seed: "\\U99999999999"\n', "c.yaml: not YAML: Python int too large"),
        ("seed: 2024-13-45\n", "c.yaml: not YAML: month must be in 1..12"),
        ("seed: !!python/object:os.system {}\n", "c.yaml:1: not YAML: could not determine a constructor"),
        ("? [a]\n: b\n", "c.yaml:1: not YAML: found unhashable key"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(text: str, message: str) -> None:
    assert message in refusal(base=text)


def test_a_key_given_twice_is_refused() -> None:
    """YAML would keep the last and lose the first in silence."""
    assert refusal("seed: 1\nseed: 2\n") == "c.yaml:5: seed stands in line 4 already; keep one of them"
    message = refusal("train:\n  steps: 3\n  lr: 1\n  steps: 4\n")
    assert message == "c.yaml:7: train.steps stands in line 5 already; keep one of them"
    assert "a.a" in refusal("a: &a {a: *a, a: 1}\n")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"config {path} cannot be read: {reason}"):
            load_config(path)
    (tmp_path / "c.yaml").write_bytes(b"run: \xff\n")
    with pytest.raises(ConfigError, match=r"c\.yaml is not UTF-8 text"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.lr=5e-5", "train.gamma=1e16", "seed=3"],
        ["run.dir='1e-3'", "target.revision='2024-01-01'"],
        ["run.dir='yes'", "data.train=['ünï: #.jsonl', '- x', '']"],
        ["topology={target: ['cpu:0'], drafter: ['cpu:1', 'cpu:2']}"],
        ["drafter={layers: 2, layer_types: [full_attention, sliding_attention], sliding_window: 8, taps: [0, 2]}"],
    ],
)
def test_what_is_dumped_reads_back_the_same(overrides: list[str]) -> None:
    config = load("", *overrides)
    Path("again.yaml").write_text(dump_config(config, ["mask token: 5 (its own)"]), encoding="utf-8")
    again = load_config(Path("again.yaml"))
    assert again == config
    assert differing_keys(config, again) == []
    assert Path("again.yaml").read_text(encoding="utf-8").startswith("# mask token: 5 (its own)\n")


def test_differing_keys_are_dotted_paths() -> None:
    a, b = load(), load("", "train.lr=1e-3", "seed=1", "topology={target: [x], drafter: [y]}")
    assert differing_keys(a, b) == ["seed", "topology", "topology.drafter", "topology.target", "train.lr"]


def test_a_config_never_changes() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().seed = 1


def _fields(model: Any, prefix: str = "") -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, info in model.model_fields.items():
        inner = info.annotation
        if hasattr(inner, "model_fields"):
            found |= _fields(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = info.description
    return found


def test_every_key_has_a_text() -> None:
    assert [key for key, text in _fields(Config).items() if not text] == []


def test_dumped_keys_are_all_keys() -> None:
    dumped = yaml.safe_load(dump_config(load(), []))
    assert {f"{s}.{k}" for s, v in dumped.items() if isinstance(v, dict) for k in v} | {
        s for s, v in dumped.items() if not isinstance(v, dict)
    } == set(_fields(Config))


@pytest.mark.parametrize("key", ["seed", "data.anchor_density", "data.template_arguments.x", "topology", "data.train"])
def test_a_number_that_python_does_not_print(key: str) -> None:
    """YAML reads them, in other bases (found by fuzzing)."""
    with pytest.raises(ConfigError, match=rf"^--set {key}=0xf+…: {key} is a value with thousands of digits: "):
        load_config(embedded.CONFIG, [f"{key}=0x{'f' * 5000}"])


@pytest.mark.parametrize("odd", ["\x85", "a\u2028b", "\u00e9\u4e2d", " x\x85 ", "\ufeff"])
def test_odd_characters_are_read_back_as_written(odd: str, tmp_path: Path) -> None:
    """Found by fuzzing: as a key, PyYAML writes a NEL so that it reads a space."""
    config = load_config(embedded.CONFIG)
    data = config.data.model_copy(update={"template_arguments": {odd: odd}})
    config = config.model_copy(update={"data": data})
    (tmp_path / "c.yaml").write_text(dump_config(config, ["a note"]), encoding="utf-8")
    assert load_config(tmp_path / "c.yaml") == config
