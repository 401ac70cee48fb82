"""Rows that cannot be learned from are left out, recorded and counted; the others are learned from as if alone."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import Quiet, run_training
from draftsmith.config import Config
from draftsmith.errors import InputError
from draftsmith.pipeline.bad_rows import BadRows, TooManyBadRowsError
from draftsmith.pipeline.journal import DivergedError
from draftsmith.pipeline.trainer import Run, RunResult, train
from draftsmith.target.capture import decoder_layers

MakeConfig = Callable[..., Config]
BAD = 6  # of step 2, as a step has four rows


def trained(config: Config, plant: Callable[[Run], None], *, resume: bool = False) -> tuple[RunResult, Quiet]:
    """A run in which `plant` hooks something into the models before the workers start."""

    quiet = Quiet()

    def listener(run: Run) -> Quiet:
        plant(run)
        return quiet

    result = train(config, resume=resume, stop=threading.Event(), listener=listener, log=quiet.log)
    return result, quiet


def nan_features(row: int) -> Callable[[Run], None]:
    """A layer of the target gives NaN in one place when it computes this row, which is its row-th call."""

    def plant(run: Run) -> None:
        target = run.job.target
        layer, calls = decoder_layers(target.model, target.config.num_hidden_layers)[1], iter(range(10**6))

        def hook(module: Any, inputs: Any, output: Any) -> Any:
            if next(calls) == row:
                handle.remove()
                hidden = (output[0] if isinstance(output, tuple) else output).clone()
                hidden[0, 0, 0] = float("nan")
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
            return None

        handle = layer.register_forward_hook(hook)

    return plant


def infinite_loss(row: int) -> Callable[[Run], None]:
    """The drafter's last norm gives infinity for this row, which is its row-th forward."""

    def plant(run: Run) -> None:
        (worker,) = run.drafters.values()
        calls = iter(range(10**6))
        worker.drafter.norm.register_forward_hook(
            lambda module, inputs, output: output * float("inf") if next(calls) == row else None
        )

    return plant


def infinite_gradient(step: int) -> Callable[[Run], None]:
    """A gradient overflows in the step-th step."""

    def plant(run: Run) -> None:
        (worker,) = run.drafters.values()
        calls = iter(range(10**6))
        worker.drafter.norm.weight.register_hook(
            lambda grad: torch.full_like(grad, float("inf")) if next(calls) // 4 == step - 1 else None
        )

    return plant


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def final_weights(result: RunResult) -> dict[str, torch.Tensor]:
    return load_file(result.folder / "checkpoints" / f"step-{result.step}" / "drafter.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def one_document_per_row(make: MakeConfig, name: str, **changes: Any) -> Config:
    base = Path(make().run.dir).parent
    return make(run__dir=str(base / name), data__packing=False, checkpoint__every=1, checkpoint__keep=9, **changes)


@pytest.mark.parametrize(("plant", "reason"), [(nan_features, "features are not finite"), (infinite_loss, "loss is")])
def test_a_bad_row_is_left_out_and_recorded(
    demo_config: MakeConfig, plant: Callable[[int], Callable[[Run], None]], reason: str
) -> None:
    result, quiet = trained(one_document_per_row(demo_config, "bad"), plant(BAD))
    (line,) = lines(result.folder, "bad-rows.jsonl")
    assert (line["step"], line["rows"]) == (2, [BAD])
    assert len(line["documents"]) == 1
    assert reason in line["reason"]
    metrics = lines(result.folder, "metrics.jsonl")
    assert [m["skipped_rows"] for m in metrics] == [0, 1, 0, 0]
    assert all(m["loss"] > 0 for m in metrics)
    assert any(
        line.startswith(f"warning: step 2 leaves out row {BAD}: ") and "1 of at most 64" in line for line in quiet.lines
    )


def test_it_does_not_matter_why_a_row_is_left_out(demo_config: MakeConfig) -> None:
    """A row whose loss is infinite leaves no trace in the gradient: the weights are those of a run without its
    features; and other rows are learned from as before."""
    results = [
        trained(one_document_per_row(demo_config, str(number)), plant(BAD))[0]
        for number, plant in enumerate((nan_features, infinite_loss))
    ]
    untouched, _, _ = run_training(one_document_per_row(demo_config, "untouched"))
    assert same(*map(final_weights, results))
    assert not same(final_weights(results[0]), final_weights(untouched))
    first = [lines(result.folder, "metrics.jsonl")[0]["loss"] for result in (*results, untouched)]
    assert first[0] == first[1] == first[2]


def test_a_step_whose_gradient_overflows_moves_nothing(demo_config: MakeConfig) -> None:
    config = one_document_per_row(demo_config, "run")
    result, quiet = trained(config, infinite_gradient(3))
    checkpoints = result.folder / "checkpoints"
    for file in ("drafter.safetensors", "optimizer.safetensors"):
        before, after = (load_file(checkpoints / f"step-{step}" / file) for step in (2, 3))
        assert same(before, after)
    last = load_file(checkpoints / "step-4" / "drafter.safetensors")
    assert not same(last, load_file(checkpoints / "step-3" / "drafter.safetensors"))
    third = lines(result.folder, "metrics.jsonl")[2]
    assert (third["skipped_rows"], third["lr"], third["grad_norm"]) == (4, 0.0, None)
    (line,) = lines(result.folder, "bad-rows.jsonl")
    assert line["rows"] == [8, 9, 10, 11]
    assert any("all rows from 8 to 11: the gradient's norm is inf" in line for line in quiet.lines)


def test_a_step_without_a_good_row_moves_nothing(demo_config: MakeConfig) -> None:
    def plant(run: Run) -> None:
        for row in range(4, 8):
            infinite_loss(row)(run)

    result, _ = trained(one_document_per_row(demo_config, "run"), plant)
    second = lines(result.folder, "metrics.jsonl")[1]
    assert (second["loss"], second["skipped_rows"], second["tokens"]) == (None, 4, 0)
    folders = [result.folder / "checkpoints" / f"step-{step}" / "drafter.safetensors" for step in (1, 2)]
    assert same(*map(load_file, folders))


def test_three_steps_without_a_good_row_end_the_run(demo_config: MakeConfig) -> None:
    """Weights that are finite and of no use: the budget alone would let such a run end as a success."""

    def plant(run: Run) -> None:
        for row in range(4, 40):
            infinite_loss(row)(run)

    config = one_document_per_row(demo_config, "run", train__steps=9)
    with pytest.raises(DivergedError, match="not one row of the last 3 steps could be learned from"):
        trained(config, plant)


def test_the_budget_ends_the_run_and_counts_on_after_a_resume(demo_config: MakeConfig) -> None:
    config = one_document_per_row(demo_config, "run", train__max_bad_rows=1)

    def two(run: Run) -> None:
        infinite_loss(1)(run)
        infinite_loss(BAD)(run)

    with pytest.raises(TooManyBadRowsError, match=r"2 rows could not be learned from, train\.max_bad_rows allows 1"):
        trained(config, two)
    assert [line["rows"] for line in lines(Path(config.run.dir), "bad-rows.jsonl")] == [[1], [BAD]]
    assert len(lines(Path(config.run.dir), "metrics.jsonl")) == 1, "the step that broke the budget is not recorded"
    with pytest.raises(TooManyBadRowsError):
        trained(config, infinite_loss(BAD - 4), resume=True)  # from step 1: four rows fewer are computed
    assert [line["rows"] for line in lines(Path(config.run.dir), "bad-rows.jsonl")] == [[1], [BAD]]
    healthy, _ = trained(config, lambda run: None, resume=True)
    assert healthy.finished
    assert [line["rows"] for line in lines(Path(config.run.dir), "bad-rows.jsonl")] == [[1]]


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"step": 1, "rows": 3}', "\xff"])
def test_a_damaged_record_is_named(tmp_path: Path, damage: str) -> None:
    whole = '{"step": 1, "rows": [3], "documents": [], "reason": ""}'
    (tmp_path / "bad-rows.jsonl").write_text(f"{whole}\n{damage}\n{whole}\n", encoding="latin-1")
    with pytest.raises(InputError, match=r"bad-rows\.jsonl:2 is damaged; remove the line"):
        BadRows(tmp_path, 1, 64)


def test_replicas_leave_out_the_same_rows_as_one(demo_config: MakeConfig) -> None:
    one, _ = trained(one_document_per_row(demo_config, "one"), nan_features(BAD))
    two, _ = trained(one_document_per_row(demo_config, "two", topology="1+2", pipeline__threads=1), nan_features(BAD))
    assert lines(one.folder, "bad-rows.jsonl") == lines(two.folder, "bad-rows.jsonl")
    a, b = final_weights(one), final_weights(two)
    assert all(float((a[name] - b[name]).norm()) <= 1e-5 * float(b[name].norm()) for name in b)
