"""A plan decides what training decides, counts what training keeps, and refuses what does not fit with what would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

from conftest import random_documents, row_source, tiny_drafter
from draftsmith import cli
from draftsmith.config import Config, load_config, load_machine, parse_config
from draftsmith.drafter.anchors import make_blocks
from draftsmith.drafter.model import RotaryTable
from draftsmith.errors import ConfigError, InputError
from draftsmith.pipeline.machine import Device, Machine, described_machine, this_machine
from draftsmith.pipeline.memory import Sizes, activations, memory_table, totals
from draftsmith.pipeline.plan import Plan, make_plan
from draftsmith.pipeline.prepare import check_capacity, choose_attention, prepare
from draftsmith.pipeline.topology import Topology
from draftsmith.report.plan import print_plan
from draftsmith.target.load import TargetSpec

ROOT = Path(__file__).parents[2]
MIB, GIB = 2**20, 2**30
MakeConfig = Callable[..., Config]

# Qwen3-8B, from its config.json: every tensor, counted by hand.
V, H, L, I = 151_936, 4_096, 36, 12_288  # noqa: E741
QUERIES, KEYS, D = 32 * 128, 8 * 128, 128
LAYER = H * QUERIES + 2 * H * KEYS + QUERIES * H + 3 * H * I + 2 * H + 2 * D
TARGET = 2 * V * H + L * LAYER + H
DRAFTER = 5 * H * H + 5 * LAYER + 2 * H  # fc, five layers, hidden_norm and norm
T, N, B = 3_072, 512, 16
SLOTS = N * B


@pytest.fixture
def qwen3(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(ROOT)
    return load_config(Path("examples/qwen3-8b.yaml"))


def h100(gib: float = 80, count: int = 8, host_gib: float = 1024) -> Machine:
    return Machine(96, round(host_gib * GIB), (Device("H100", round(gib * GIB)),) * count)


def sizes_at(plan: Plan, place: str) -> dict[str, int]:
    return {item.name: item.nbytes for item in plan.memory if item.place == place}


def decided(plan: Plan) -> dict[str, tuple[str, str]]:
    return {d.name: (str(d.value), d.reason) for d in plan.decisions}


def test_the_example_machine_is_described() -> None:
    assert described_machine(load_machine(ROOT / "examples" / "machines" / "8xh100.yaml")) == h100()


def test_qwen3_8b_is_counted(qwen3: Config) -> None:
    plan = make_plan(qwen3, h100())
    assert (TARGET, DRAFTER) == (8_190_735_360, 1_048_626_432)
    assert (plan.sizes.target_weights, plan.sizes.drafter_weights) == (TARGET, DRAFTER)
    assert plan.refusal is None


def test_the_memory_of_a_target_device(qwen3: Config) -> None:
    padded = int(1.15 * T)
    assert sizes_at(make_plan(qwen3, h100()), "cuda:0") == {
        "target weights": 2 * TARGET,
        "target activations": 2 * padded * (5 * H + 3 * I),
        "tapped states": 2 * 2 * padded * 5 * H,
        "channel": 2_048 * MIB,
        "features in training": 3 * T * 5 * H * 2,
        "evaluation": 2 * L * KEYS * (T + 512) * 2 + B * V * (2 + 4),
        "CUDA context": GIB,
    }
    assert "evaluation" not in sizes_at(make_plan(qwen3, h100()), "cuda:1")


def test_the_memory_of_a_drafter_device(qwen3: Config) -> None:
    plan = make_plan(qwen3, h100())
    # Saved for the backward, bf16 but for the insides of norms, which are fp32 like their scales and the log-sum-exp.
    norms = 2 * (4 + 2) * H + 4 * (2 + 32 + 8)
    queries, keys, mlp = (4 + 2 + 2 * 2) * QUERIES + 4 * 32, (4 + 2 + 2) * KEYS, 2 * 3 * I
    layer = SLOTS * (norms + queries + keys + mlp) + T * (keys + 4 * 8)
    ends = SLOTS * (4 + 5 * 2) * H + T * (4 + 2) * H + (SLOTS + T) * (4 + 2 * 4 * D)
    labels = 128
    padded = 32 * SLOTS + 2 * 8 * (T + SLOTS)  # 512 blocks and 3,072 tokens are whole tiles already
    tables = 4 * (4 * SLOTS + 4 * (SLOTS // 128) * ((T + SLOTS) // 128))
    assert sizes_at(plan, "cuda:5") == {
        "drafter weights": 4 * DRAFTER,
        "gradients": 4 * DRAFTER,
        "adamw state": 8 * DRAFTER,
        "rotary table": 2 * 4 * (T + B) * D,
        "bf16 weights": 2 * DRAFTER,
        "features of the row": 2 * T * 5 * H,
        "activations": 5 * layer + ends,
        "backward": SLOTS * (2 * 3 * I + 4 * 3 * H) + 4 * 5 * H * H,
        "attention gradients and tables": 2 * 2 * padded * D + tables,
        "loss chunk": labels * V * (4 + 2 + 2),
        "embedding and head": 2 * V * H * 2,
        "CUDA context": GIB,
    }
    assert sizes_at(plan, "cuda:5") == sizes_at(plan, "cuda:7")
    assert set(totals(plan.memory)) == {"host", *(f"cuda:{n}" for n in range(8))}


def test_blockwise_attention_is_counted_by_its_chunks(qwen3: Config) -> None:
    drafter = qwen3.drafter.model_copy(update={"attention": "blockwise"})
    reach = T + 128
    found = sizes_at(make_plan(qwen3.model_copy(update={"drafter": drafter}), h100()), "cuda:5")
    assert found["attention chunk and masks"] == 2**24 + 2 * 4 * 128 * reach + 4 * 2 * reach * KEYS


def test_flex_is_counted_as_it_pads(qwen3: Config) -> None:
    """One block or token more is a tile more."""
    data = qwen3.data.model_copy(update={"row_tokens": T + 1, "row_anchors": N + 1})
    sizes = make_plan(qwen3.model_copy(update={"data": data}), h100()).sizes
    assert (sizes.row_slots, sizes.row_context) == (SLOTS + 128, T + 128)


def test_attention_is_chosen_with_a_reason(qwen3: Config, demo_config: MakeConfig) -> None:
    assert decided(make_plan(qwen3, h100()))["attention"] == (
        "flex",
        "CUDA: one compiled kernel for all blocks of a row",
    )
    value, reason = decided(make_plan(demo_config(), this_machine()))["attention"]
    assert (value, "no backward on the CPU" in reason) == ("blockwise", True)
    with pytest.raises(ConfigError, match=r"drafter\.attention: flex cannot train here: .* no backward on the CPU"):
        make_plan(demo_config(drafter__attention="flex"), this_machine())
    small, cuda = tiny_drafter().config.head_dim, Topology(("cuda:0",), ("cuda:0",))
    assert "takes no heads of 8" in choose_attention(qwen3, cuda, small).reason


def test_the_memory_of_the_host(qwen3: Config) -> None:
    assert sizes_at(make_plan(qwen3, h100()), "host") == {
        "Python and libraries": 448 * MIB,
        "drafter as it starts": 4 * DRAFTER,
        "target on its way": 2 * TARGET,
        "checkpoint on its way": 12 * DRAFTER,
        "CUDA libraries": 8 * 512 * MIB,
    }


def test_a_plan_needs_neither_data_nor_tokenizer(qwen3: Config) -> None:
    found = decided(make_plan(qwen3, h100()))
    assert found["rows"] == ("not counted", "file missing: conversations.jsonl")
    assert found["mask token"][0] == found["loss mask"][0] == "decided at load"
    assert found["steps"][0] == "None"
    assert found["topology"][0].startswith("5+3 (target cuda:0")
    assert found["threads per worker"] == ("48", "96 cores; workers compute on their GPUs")  # the described machine's


def test_a_skeleton_has_no_memory(qwen3: Config) -> None:
    model = TargetSpec(qwen3.target.model).skeleton()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_no_weight_is_loaded(qwen3: Config, demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("a plan loads no weights")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    make_plan(qwen3, h100())
    make_plan(demo_config(), this_machine())


def test_a_plan_decides_what_training_decides(demo_config: MakeConfig) -> None:
    """Every decision that does not need weights, with its reason, on the same config."""
    config = demo_config(topology="2+1", train__steps=None, eval__every=5)
    job = prepare(config)
    plan, needs_weights = make_plan(config, this_machine()), {"drafter start"}
    trained = {d.name: (str(d.value), d.reason) for d in job.decisions if d.name not in needs_weights}
    assert {name: decided(plan)[name] for name in trained} == trained
    assert {"topology", "threads per worker", "taps", "mask token", "gamma", "evaluation", "steps"} <= set(trained)
    assert plan.sizes.topology == job.topology
    assert plan.sizes.drafter_weights == sum(p.numel() for p in job.drafter.parameters())
    assert plan.sizes.target_weights == sum(p.numel() for p in job.target.model.parameters())
    assert plan.sizes.row_bytes == config.data.row_tokens * job.feature_bytes_per_token
    assert decided(plan)["rows"][0].startswith(f"{job.source.epoch_rows(0)} of 256 tokens")


def test_a_plan_leaves_nothing_behind(demo_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(demo_config().model_dump()))
    assert cli.main(["train", str(tmp_path / "c.yaml"), "--plan"]) == 0
    assert not (tmp_path / "run").exists()


def test_workers_on_the_cpu_share_the_host(demo_config: MakeConfig) -> None:
    one, more = (sizes_at(make_plan(demo_config(topology=t), this_machine()), "host") for t in ("1+1", "2+3"))
    assert one["target weights"] == more["target weights"]
    assert "embedding and head" not in one | more
    assert more["target activations"] == 2 * one["target activations"]
    assert more["drafter weights"] == 3 * one["drafter weights"]
    assert more["activations"] == 3 * one["activations"]


def test_one_device_for_both_roles_holds_no_copies(qwen3: Config) -> None:
    config = qwen3.model_copy(update={"topology": "1+1"})
    both = sizes_at(make_plan(config, h100(count=1)), "cuda:0")
    assert {"target weights", "drafter weights"} <= set(both)
    assert "embedding and head" not in both
    assert "features of the row" not in both


def test_muon_keeps_one_number_per_weight_of_a_matrix(qwen3: Config) -> None:
    train = qwen3.train.model_copy(update={"optimizer": "muon"})
    found = sizes_at(make_plan(qwen3.model_copy(update={"train": train}), h100()), "cuda:5")
    norms = 5 * (2 * H + 2 * D) + 2 * H
    assert found["muon state"] == 4 * (DRAFTER - norms) + 8 * norms


def test_what_the_update_needs_beyond_a_small_step_is_counted() -> None:
    """With few slots the sum over replicas (two copies of the gradient) is larger than the activations."""
    shape = tiny_drafter(hidden_size=256, intermediate_size=1024).config
    sizes = Sizes(
        topology=Topology(("cuda:0",), ("cuda:1", "cuda:2")), target_weights=1, target_layers=5, itemsize=2,
        mlp_width=48, shape=shape, drafter_weights=50_000_000, matrices=((256, 1024),), optimizer="adamw",
        row_tokens=64, row_anchors=2, batch_rows=1, channel_bytes=1, eval_tokens=0,
    )  # fmt: skip
    found = {item.name: item.nbytes for item in memory_table(sizes) if item.place == "cuda:1"}
    step = sum(found[n] for n in ("activations", "backward", "attention chunk and masks", "loss chunk"))
    assert found["update, beyond the above"] == 8 * 50_000_000 - step


def config_only(folder: Path, **values: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 100, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}  # fmt: skip


def test_experts_and_ties_are_counted(tmp_path: Path) -> None:
    folder = config_only(tmp_path / "moe", **MOE)
    plan = make_plan(config_for(folder), this_machine())
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 32 + 2 * 8 + 7 * 3 * 32 * 20 + 7 * 32
    assert plan.sizes.target_weights == 100 * 32 + 6 * layer + 32
    assert plan.sizes.mlp_width == 60


def config_for(model: Path, **changes: Any) -> Config:
    data = {"run": {"dir": "r"}, "target": {"model": str(model)}, "data": {"train": ["none.jsonl"]}, "device": "cpu"}
    return parse_config(data | changes, "test")


def test_a_config_that_training_refuses_is_refused(tmp_path: Path) -> None:
    folder = config_only(tmp_path / "moe", **MOE)
    with pytest.raises(InputError, match=r"drafter\.taps"):
        make_plan(config_for(folder, drafter={"taps": [5]}), this_machine())
    with pytest.raises(ConfigError, match=r"data\.row_anchors is 3"):
        make_plan(config_for(folder, data={"train": ["none.jsonl"], "row_anchors": 3}), this_machine())
    with pytest.raises(ConfigError, match="has 1 CUDA device"):
        make_plan(config_for(folder, device="cuda", topology="5+3"), h100(count=1))


def test_a_target_larger_than_a_device_is_refused_with_sizes(qwen3: Config) -> None:
    refusal = make_plan(qwen3, h100(gib=12)).refusal
    assert refusal is not None
    assert "needs 15.3 GiB for its weights alone, cuda:0 has 12.0 GiB (11.4 usable)" in refusal
    assert "a target spread over several devices is not supported" in refusal
    enough = int(refusal.rpartition("at least ")[2].removesuffix(" GiB"))
    assert make_plan(qwen3, h100(gib=enough)).refusal is None


@pytest.mark.parametrize(
    ("settings", "gib", "begins", "first"),
    [
        ([], 31, "cuda:5 needs 29.8 GiB and has 31.0 GiB (29.4 usable); largest: adamw state 7.8", "drafter.checkp"),
        (
            ["drafter.checkpointing=layer", "data.row_tokens=12288", "data.row_anchors=2048"],
            36, "cuda:5 needs 35.1 GiB and has 36.0 GiB (34.2 usable)", "data.row_tokens=",
        ),
    ],
    ids=["recompute", "shorter rows"],
)  # fmt: skip
def test_what_would_fit_does_fit(qwen3: Config, settings: list[str], gib: int, begins: str, first: str) -> None:
    path = Path("examples/qwen3-8b.yaml")
    refusal = make_plan(load_config(path, settings), h100(gib=gib)).refusal
    assert refusal is not None
    assert refusal.startswith(begins)
    assert "\n" not in refusal
    change, _, machine = refusal.partition("would fit: ")[2].partition(", or devices of at least ")
    overrides = change.split()
    assert overrides[0].startswith(first)
    assert make_plan(load_config(path, [*settings, *overrides]), h100(gib=gib)).refusal is None
    assert make_plan(load_config(path, settings), h100(gib=int(machine.removesuffix(" GiB")))).refusal is None


def test_recomputed_layers_keep_their_inputs_and_one_layer(qwen3: Config) -> None:
    drafter = qwen3.drafter.model_copy(update={"checkpointing": "layer"})
    thrifty = sizes_at(make_plan(qwen3.model_copy(update={"drafter": drafter}), h100()), "cuda:5")
    plain = sizes_at(make_plan(qwen3, h100()), "cuda:5")
    one = 2 * (4 + 2) * H + 4 * 42 + 10 * QUERIES + 4 * 32 + 8 * KEYS + 6 * I
    assert plain["activations"] - thrifty["activations"] == 4 * (SLOTS * one + T * (8 * KEYS + 32)) - 5 * SLOTS * 2 * H


def test_a_host_that_is_too_small_is_told_fewer_workers(demo_config: MakeConfig) -> None:
    config = demo_config(topology="1+40", pipeline__channel_mib=1)
    need = totals(make_plan(config, this_machine()).memory)["host"]
    small = Machine(2, round(need * 0.9), ())
    assert "would fit: topology=1+1, or a host of at least" in str(make_plan(config, small).refusal)
    assert make_plan(demo_config(topology="1+1", pipeline__channel_mib=1), small).refusal is None


def test_a_channel_that_holds_no_target_call_is_refused(demo_config: MakeConfig) -> None:
    """Space for all rows of a call is reserved before any is made: less would wait for ever."""
    row_mib = 4
    for rows, channel_mib, fits in ((1, row_mib, True), (2, row_mib, False), (2, 2 * row_mib, True)):
        config = demo_config(pipeline__channel_mib=channel_mib, pipeline__target_batch_rows=rows, data__row_tokens=1024)
        refusal = make_plan(config, this_machine()).refusal
        assert (refusal is None) is fits
        assert fits or "pipeline.channel_mib 4 holds less than the features of one target call (5 MiB)" in str(refusal)
        if not fits:
            with pytest.raises(InputError, match="channel_mib"):
                check_capacity(config, 5 * 128 * 4)


@pytest.mark.parametrize("lower", [False, True], ids=["fp32", "bf16"])
def test_activations_are_what_autograd_saves(lower: bool) -> None:
    """The formula against the tensors a forward really keeps; under autocast weights are copied, which is counted
    elsewhere."""
    row = row_source(random_documents(3, [60, 64, 50]), row_tokens=256, row_anchors=128).row(0)
    drafter = tiny_drafter(layer_types=("full_attention",) * 4)
    blocks = make_blocks(row, block_size=4, mask_token=63, gamma=4.0)
    dtype = torch.bfloat16 if lower else torch.float32
    features, embedding = torch.randn(len(row.tokens_T), 96, dtype=dtype), torch.randn(64, 32, dtype=dtype)
    shapes = [tuple(p.shape) for p in drafter.parameters()]
    weights = {*shapes, *(shape[::-1] for shape in shapes)}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tuple(tensor.shape) not in {*weights, tuple(features.shape)}:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rotary = RotaryTable(drafter.config, 256, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", dtype, lower):
        drafter(features, row.positions_T, blocks, embedding, rotary)
    slots, tokens = len(blocks.anchors) * 4, len(row.tokens_T)
    device = "cuda" if lower else "cpu"
    sizes = Sizes(
        topology=Topology((f"{device}:0",), (f"{device}:1",)), target_weights=1, target_layers=5,
        itemsize=dtype.itemsize, mlp_width=48, shape=drafter.config, drafter_weights=1, matrices=((1, 1),),
        optimizer="adamw", row_tokens=tokens, row_anchors=len(blocks.anchors), batch_rows=1, channel_bytes=1,
        eval_tokens=0,
    )  # fmt: skip
    _, expected, _ = activations(sizes)
    unseen = 5 * dtype.itemsize * 32 * slots  # not saved by the model: loss
    assert sum(t.untyped_storage().nbytes() for t in saved.values()) == pytest.approx(expected - unseen, rel=0.01)


def test_the_command_refuses_in_one_line_after_the_table(
    qwen3: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = tmp_path / "m.yaml"
    machine.write_text("host_memory_gib: 64\ncores: 8\ndevices: {count: 8, memory_gib: 12}\n")
    assert cli.main(["train", "examples/qwen3-8b.yaml", "--plan", "--machine", str(machine)]) == 1
    out, err = capsys.readouterr()
    assert "DOES NOT FIT" in out
    assert err.count("\n") == 1
    assert err.startswith("draftsmith: target.model examples/qwen3-8b needs 15.3 GiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "examples/machines/8xh100.yaml"], "add --plan"),
        (["--plan", "--resume"], "leave out --resume"),
        (["--plan", "--machine", "none.yaml"], "none.yaml cannot be read"),
        (["--plan", "--machine", "examples/demo.yaml"], "a machine has host_memory_gib, cores, devices"),
    ],
)
def test_arguments_that_contradict_exit_2(
    arguments: list[str], message: str, qwen3: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "examples/qwen3-8b.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_is_plain_text_outside_a_terminal(qwen3: Config, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(make_plan(qwen3, h100()))
    text = capsys.readouterr().out
    assert "Memory of cuda:5, cuda:6, cuda:7, each (drafter)" in text
    assert f"2 x {TARGET:,} weights" in text
    assert "not counted  (file missing: conversations.jsonl)" in text
    assert not set("│┃━─\x1b") & set(text)


def test_a_plan_is_tables_on_a_terminal(qwen3: Config, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(make_plan(qwen3, h100()), Console(force_terminal=True, width=200))
    assert "│ target weights" in capsys.readouterr().out
