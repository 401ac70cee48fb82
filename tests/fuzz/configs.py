"""Configs: YAML made from valid ones by changing keys, values and characters, with `--set` beside it."""

from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from draftsmith import embedded
from draftsmith.config import Config, differing_keys, dump_config, load_config, parse_config
from draftsmith.data.settings import TemplateSettings
from draftsmith.decisions import Ledger
from draftsmith.errors import InputError
from draftsmith.pipeline import prepare
from draftsmith.pipeline.machine import this_machine
from fuzz.fuzzing import changed, junk, one_line, scalars, texts

Example = tuple[bytes, list[str]]  # the file, and overrides
SNIPPETS = ["&a ", "*a", "!!python/object:os.system ", "!!binary ", "<<: ", "? ", "---\n", "...\n", "%YAML 9\n", "\t",
            "{", "[", "'", '"\\ud800"', "|\n", "0x", "1_0", "2026-99-99", "~", ": ", "- ", "# ", "\x07", "=", "1e",
            "12:30:45", "2001-12-14t21:59:43.10-05:00", "0" * 5000, "9" * 5000]  # fmt: skip
FULL: dict[str, Any] = {
    **yaml.safe_load(embedded.CONFIG.read_text()),
    "topology": {"target": ["cpu:0"], "drafter": ["cpu:1"]},
    "seed": 3,
    "eval": {"every": 0, "prompts": ["demo"], "limit": 3},
    "store": {"dir": "x", "dtype": "bfloat16"},
    "pipeline": {"channel_mib": 3, "target_batch_rows": 1, "threads": 2},
}
_SECTIONS = {s: v for s, v in parse_config(FULL, "full").model_dump().items() if isinstance(v, dict)}
KEYS = [f"{s}.{k}" for s, section in _SECTIONS.items() for k in section] + ["seed", "device", "topology", "features"]


def examples() -> st.SearchStrategy[Example]:
    """Half of them have one well-formed change, so that deeper checks are reached."""
    values = st.one_of(scalars, junk, st.sampled_from(SNIPPETS), st.dates(), texts.map(lambda t: date(2026, 1, 1)))
    overrides = st.lists(
        st.one_of(st.builds(_override, st.sampled_from(KEYS), values), st.text(max_size=20)), max_size=2
    )
    return st.tuples(_files(), overrides)


def _override(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).strip()}"


@st.composite
def _files(draw: st.DrawFn) -> bytes:
    data = draw(changed(FULL, most=2))
    try:
        text = yaml.safe_dump(data, allow_unicode=draw(st.booleans()), sort_keys=False)
    except (yaml.YAMLError, RecursionError):
        text = "a: 1\n"
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(SNIPPETS)) + text[at + draw(st.integers(0, 5)) :]
    return text.encode("utf-8", draw(st.sampled_from(["surrogatepass", "replace"])))


def checker(folder: Path) -> Callable[[Example], None]:
    machine = this_machine()

    def check(example: Example) -> None:
        path = folder / "c.yaml"
        path.write_bytes(example[0])
        try:
            config = load_config(path, example[1])
        except InputError as error:
            one_line(error)
            return
        again = folder / "again.yaml"
        again.write_text(dump_config(config, ["a note"]), encoding="utf-8")
        assert differing_keys(config, load_config(again)) == []
        data = config.data
        TemplateSettings(data.thinking, data.template_arguments, data.template_date).to_json()
        try:
            _decide(config, machine)
        except InputError as error:
            one_line(error)

    return check


def _decide(config: Config, machine: Any) -> None:
    """All that a plan decides before weights and data are read."""
    if config.target.model != "demo":
        config = config.model_copy(update={"target": config.target.model_copy(update={"model": "demo"})})
    known = prepare.outline(config, machine, Ledger())
    shape = prepare.choose_shape(config, known.target_config, known.taps, config.drafter.mask_token or 0, 512)
    prepare.choose_attention(config, known.topology, shape.head_dim)
    prepare.choose_gamma(config)
    prepare.packing_settings(config)
    prepare.choose_steps(config, None)
    prepare.channel_need(config, shape.feature_size * 4)
    with suppress(InputError):
        prepare.check_capacity(config, shape.feature_size * 4)
