"""Whole runs on the embedded target: topology and packing do not change the maths, resume is exact, faults stop."""

import inspect
import json
import shutil
import threading
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from conftest import Quiet, random_documents, row_source, run_training, tiny_drafter
from draftsmith.config import Config
from draftsmith.data.template import Renderer
from draftsmith.drafter.anchors import make_blocks
from draftsmith.drafter.loss import HeadScaling, block_loss
from draftsmith.drafter.model import RotaryTable
from draftsmith.errors import ConfigError
from draftsmith.nouns import Span
from draftsmith.pipeline import workers
from draftsmith.pipeline.checkpoint import Checkpoints
from draftsmith.pipeline.journal import DivergedError
from draftsmith.pipeline.metrics import cut_lines
from draftsmith.pipeline.prepare import read_corpus
from draftsmith.pipeline.trainer import Run
from draftsmith.pipeline.workers import DrafterWorker, TargetWorker
from draftsmith.target.load import Target

MakeConfig = Callable[..., Config]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step}" / "drafter.safetensors")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest relative Frobenius difference of any tensor."""
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


@pytest.mark.parametrize("topology", ["2+1", "1+2", "3+2"])
def test_topology_does_not_change_the_maths(demo_config: MakeConfig, tmp_path: Path, topology: str) -> None:
    one, _, _ = run_training(demo_config(run__dir=str(tmp_path / "one"), topology="1+1", pipeline__threads=1))
    many, _, runs = run_training(demo_config(run__dir=str(tmp_path / "many"), topology=topology, pipeline__threads=1))
    assert f"{len(runs[0].targets)}+{len(runs[0].drafters)}" == topology
    for a, b in zip(metrics(one.folder), metrics(many.folder), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert (a["tokens"], a["anchors"]) == (b["tokens"], b["anchors"])
    assert relative(weights(many.folder, 4), weights(one.folder, 4)) <= 1e-5


@pytest.mark.slow
def test_twenty_steps_under_every_topology(demo_config: MakeConfig, tmp_path: Path) -> None:
    """The same global batch of six rows under 1+1, 2+1, 3+2 and 5+3; every tensor has moved by then."""

    def trained(topology: str) -> tuple[list[float], dict[str, torch.Tensor], Run]:
        changes = {"topology": topology, "train__steps": 20, "train__rows_per_step": 6, "pipeline__threads": 1}
        result, _, runs = run_training(demo_config(run__dir=str(tmp_path / topology), **changes))
        return [line["loss"] for line in metrics(result.folder)], weights(result.folder, 20), runs[0]

    losses, expected, run = trained("1+1")
    start = run.job.drafter.state_dict()
    assert all(float((expected[name] - start[name]).norm() / start[name].norm()) > 1e-3 for name in start)
    for topology in ("2+1", "3+2", "5+3"):
        others, got, _ = trained(topology)
        assert others == pytest.approx(losses, rel=1e-5)
        assert relative(got, expected) <= 1e-5


def test_the_training_loop_fits_a_screen() -> None:
    """Receive, forward, loss, backward, sync, step, record: in one function of under 60 lines."""
    source = inspect.getsource(DrafterWorker.run)
    assert source.count("\n") < 60
    places = [
        source.index(step)
        for step in ("take(", "forward(", "block_loss(", "backward(", "reduce(", "update(", "record(")
    ]
    assert places == sorted(places)


def test_training_moves_every_weight_and_lowers_the_loss(demo_config: MakeConfig) -> None:
    result, _, runs = run_training(demo_config(train__steps=12))
    start, end = runs[0].job.drafter.state_dict(), weights(result.folder, 12)
    assert all(float((end[name] - start[name]).norm() / start[name].norm()) > 1e-3 for name in end)
    losses = [line["loss"] for line in metrics(result.folder)]
    assert losses[-1] < losses[0] - 1


def test_replicas_end_with_the_same_bits(demo_config: MakeConfig) -> None:
    _, _, runs = run_training(demo_config(topology="1+2", pipeline__threads=1))
    first, second = (worker.drafter.state_dict() for worker in runs[0].drafters.values())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_local_denominator_is_noticed(demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each replica divided by its own labels, two replicas would train something else."""
    one, _, _ = run_training(demo_config(run__dir=demo_config().run.dir + "-1", pipeline__threads=1))
    update = DrafterWorker.update
    monkeypatch.setattr(DrafterWorker, "update", lambda self, step, weight: update(self, step, weight / 2))
    two, _, _ = run_training(
        demo_config(run__dir=demo_config().run.dir + "-2", topology="1+2", pipeline__threads=1, train__clip=1e9)
    )
    assert relative(weights(two.folder, 4), weights(one.folder, 4)) > 1e-5


def test_a_target_100_times_slower_changes_nothing(demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    base = demo_config().run.dir
    plain, _, _ = run_training(demo_config(run__dir=base + "-plain", pipeline__threads=1))
    features = TargetWorker.run
    lock = threading.Lock()
    slow: list[TargetWorker] = []

    def run(self: TargetWorker) -> None:
        with lock:
            if not slow:
                slow.append(self)
        if slow[0] is self:
            original = self.feed.claim

            def claim() -> Any:
                rows = original()
                threading.Event().wait(0.5)
                return rows

            self.feed = type("Slow", (), {"claim": staticmethod(claim)})()  # type: ignore[assignment]
        features(self)

    monkeypatch.setattr(TargetWorker, "run", run)
    row_bytes = 256 * 5 * 128 * 4
    channel_mib = -(-2 * row_bytes // 2**20)  # room for two or three rows
    slowed, _, _ = run_training(
        demo_config(run__dir=base + "-slow", topology="3+1", pipeline__threads=1, pipeline__channel_mib=channel_mib)
    )
    assert relative(weights(slowed.folder, 4), weights(plain.folder, 4)) == 0


def document_features(span: Span) -> torch.Tensor:
    """Features that depend on the document alone."""
    return torch.randn(span.stop - span.start, 96, generator=torch.Generator().manual_seed(span.document))


def test_packed_and_alone_give_the_same_loss_gradient_and_anchors() -> None:
    """The same documents in one step, packed into rows or one per row (Show 6)."""
    documents = random_documents(7, [23, 17, 20, 9, 31, 14])
    embedding = torch.randn(64, 32, generator=torch.Generator().manual_seed(5))
    outcomes = []
    for packing in (True, False):
        source = row_source(documents, packing=packing)
        drafter = tiny_drafter()
        rotary = RotaryTable(drafter.config, 128, torch.device("cpu"))
        total, weight, anchors = 0.0, 0.0, set()
        for index in range(source.epoch_rows(0)):
            row = source.row(index)
            features_TF = torch.cat(
                [
                    torch.randn(s.stop - s.start, 96, generator=torch.Generator().manual_seed(s.document))
                    for s in row.spans
                ]
            )
            blocks = make_blocks(row, block_size=4, mask_token=63, gamma=4.0)
            hidden = drafter(features_TF, row.positions_T, blocks, embedding, rotary)
            loss = block_loss(hidden, blocks, embedding, HeadScaling())
            loss.loss.backward()  # type: ignore[no-untyped-call]
            total, weight = total + float(loss.loss.detach()), weight + float(loss.weight)
            anchors |= {
                (span.document, anchor - span.start)
                for span in row.spans
                for anchor in row.anchors_N.tolist()
                if span.start <= anchor < span.stop
            }
        gradient = torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])
        outcomes.append((source.epoch_rows(0), total / weight, gradient / weight, anchors))
    (packed_rows, packed_loss, packed_gradient, packed_anchors), (rows, loss, gradient, anchors) = outcomes
    assert packed_rows < rows == len(documents)
    assert packed_anchors == anchors
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    assert (packed_gradient - gradient).norm() <= 1e-5 * gradient.norm()


def test_resume_is_bit_exact_and_keeps_the_record(demo_config: MakeConfig, tmp_path: Path) -> None:
    def config(name: str) -> Config:
        return demo_config(run__dir=str(tmp_path / name), train__steps=8, checkpoint__every=3)

    whole, _, _ = run_training(config("whole"))
    stop = threading.Event()
    interrupted = config("cut")
    monkey = StopAt(5, stop)
    monkey.run(interrupted, stop)
    folder = tmp_path / "cut"
    assert Checkpoints(folder / "checkpoints", 3).steps()[-1] == 5
    before = (folder / "metrics.jsonl").read_bytes()
    resumed, _, _ = run_training(interrupted, resume=True)
    assert resumed.finished
    assert relative(weights(folder, 8), weights(whole.folder, 8)) == 0
    after = (folder / "metrics.jsonl").read_bytes()
    assert after.startswith(before)
    assert [line["step"] for line in metrics(folder)] == list(range(1, 9))


class StopAt:
    """Sets the stop event when a step has been recorded, as a signal handler would."""

    def __init__(self, step: int, stop: threading.Event) -> None:
        self.at, self.stop = step, stop

    def run(self, config: Config, stop: threading.Event) -> None:
        from draftsmith.pipeline.trainer import train

        class Listener(Quiet):
            def step(inner, record: Any, tau: float | None) -> None:
                if record.step == self.at - 1:
                    self.stop.set()

        result = train(config, resume=False, stop=stop, listener=lambda run: Listener(), log=lambda line: None)
        assert (result.step, result.finished) == (self.at, False)


def test_resume_under_another_topology_keeps_the_maths(demo_config: MakeConfig, tmp_path: Path) -> None:
    def config(name: str, topology: str) -> Config:
        return demo_config(
            run__dir=str(tmp_path / name), train__steps=6, checkpoint__every=3, topology=topology, pipeline__threads=1
        )

    whole, _, _ = run_training(config("whole", "1+1"))
    stop = threading.Event()
    StopAt(3, stop).run(config("cut", "2+1"), stop)
    run_training(config("cut", "1+2"), resume=True)
    assert relative(weights(tmp_path / "cut", 6), weights(whole.folder, 6)) <= 1e-5


def test_resume_of_a_finished_run_changes_nothing(demo_config: MakeConfig) -> None:
    result, _, _ = run_training(demo_config())
    before = {p: p.read_bytes() for p in result.folder.rglob("*") if p.is_file()}
    again, quiet, _ = run_training(demo_config(), resume=True)
    assert again.finished
    assert {p: p.read_bytes() for p in result.folder.rglob("*") if p.is_file()} == before
    assert any("finished" in line for line in quiet.lines)


def test_a_run_killed_before_its_draft_was_written_is_not_finished(demo_config: MakeConfig) -> None:
    """The last checkpoint is there, `draft/` is missing or still that of an earlier stop: resuming writes it."""
    result, _, _ = run_training(demo_config())
    written = (result.folder / "draft" / "model.safetensors").read_bytes()
    for damage in ("stale", "missing"):
        if damage == "stale":
            provenance = result.folder / "draft" / "draftsmith.json"
            provenance.write_text(json.dumps(json.loads(provenance.read_text()) | {"step": 2}))
            (result.folder / "draft" / "model.safetensors").write_bytes(b"old")
        else:
            shutil.rmtree(result.folder / "draft")
        again, _, _ = run_training(demo_config(), resume=True)
        assert again.finished
        assert (result.folder / "draft" / "model.safetensors").read_bytes() == written


def test_resume_with_another_setting_is_refused(demo_config: MakeConfig) -> None:
    run_training(demo_config())
    with pytest.raises(ConfigError, match=r"train\.lr"):
        run_training(demo_config(train__lr=1e-5), resume=True)


def test_a_damaged_checkpoint_is_set_aside(demo_config: MakeConfig) -> None:
    result, _, _ = run_training(demo_config(train__steps=6, checkpoint__every=2))
    expected = weights(result.folder, 6)
    victim = result.folder / "checkpoints" / "step-6" / "optimizer.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    again, quiet, _ = run_training(demo_config(train__steps=6, checkpoint__every=2), resume=True)
    assert again.finished
    assert relative(weights(result.folder, 6), expected) == 0
    assert (result.folder / "checkpoints" / "step-6.damaged").is_dir()
    assert any("damaged" in line for line in quiet.lines)


def test_resume_with_other_data_or_without_its_config_is_refused(demo_config: MakeConfig, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    lines = Path(demo_config().data.train[0]).read_text().splitlines(keepends=True)
    data.write_text("".join(lines))
    config = demo_config(data__train=[str(data)])
    result, _, _ = run_training(config)
    shutil.rmtree(result.folder / "draft")
    data.write_text("".join(reversed(lines)))
    with pytest.raises(ConfigError, match=r"data\.train .* no longer gives"):
        run_training(config, resume=True)
    (result.folder / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        run_training(config, resume=True)


def test_a_damaged_metrics_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 1}\n{broken\n{"step": 2}\n'
    path.write_bytes(kept + b'{"step": 3}\n{"step": 4')
    cut_lines(path, 2)
    assert path.read_bytes() == kept


def test_a_drafter_folder_with_foreign_files_is_replaced(demo_config: MakeConfig) -> None:
    result, _, _ = run_training(demo_config())
    (result.folder / "draft" / ".cache" / "hub").mkdir(parents=True)
    (result.folder / "draft" / "draftsmith.json").unlink()
    again, _, _ = run_training(demo_config(), resume=True)
    assert again.finished
    assert not (result.folder / "draft" / ".cache").exists()


def test_documents_end_where_the_targets_positions_end(demo_config: MakeConfig, demo_target: Target) -> None:
    """Rows may be longer than the target can read, because documents are read alone; documents may not."""
    limited = copy(demo_target.config)
    limited.max_position_embeddings = 100
    corpus = read_corpus(demo_config(), Renderer(demo_target.tokenizer), 5, limited)
    assert max(len(document.tokens_T) for document in corpus.documents) == 100
    assert corpus.truncated > 0


def test_a_worker_that_fails_stops_the_run_with_its_cause(
    demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = DrafterWorker.forward

    def failing(self: DrafterWorker, features: Any, blocks: Any) -> Any:
        if features.row.index == 9:
            raise OSError("planted")
        return forward(self, features, blocks)

    monkeypatch.setattr(DrafterWorker, "forward", failing)
    config = demo_config(train__steps=6, checkpoint__every=2, topology="2+2", pipeline__threads=1)
    with pytest.raises(OSError, match="planted"):
        run_training(config)
    monkeypatch.undo()
    newest = Checkpoints(Path(config.run.dir) / "checkpoints", 3).latest(lambda line: None)
    assert newest is not None
    assert newest.state.step == 2


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_weights_that_are_not_finite_stop_the_run(
    demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, checkpoint_every: int
) -> None:
    """They are never saved: nothing could go on from them."""
    factor = workers.learning_rate_factor
    monkeypatch.setattr(
        workers, "learning_rate_factor", lambda s, w, step, n: float("nan") if step == 1 else factor(s, w, step, n)
    )
    config = demo_config(
        checkpoint__every=checkpoint_every, eval__every=1, eval__limit=1, eval__max_new_tokens=4, train__rows_per_step=2
    )
    with pytest.raises(
        DivergedError, match=r"after step 2 .* holds NaN or infinite values; they are not saved\. Lower"
    ):
        run_training(config)
    best = load_file(Path(config.run.dir) / "best" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in best.values())
    assert Checkpoints(Path(config.run.dir) / "checkpoints", 3).steps() == ([1] if checkpoint_every else [])


def test_two_runs_in_one_directory_are_refused(demo_config: MakeConfig) -> None:
    from draftsmith.pipeline.trainer import locked

    config = demo_config()
    with locked(Path(config.run.dir), False), pytest.raises(ConfigError, match="in use"):
        run_training(config)


def test_the_best_drafter_is_the_one_with_the_highest_tau(
    demo_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.pipeline import journal

    taus = iter([1.5, 2.0, 2.0, 1.9])
    monkeypatch.setattr(journal, "decoded_tau", lambda *a: next(taus))
    result, quiet, _ = run_training(demo_config(eval__every=1))
    assert (result.best_tau, result.best_step) == (2.0, 3)
    assert json.loads((result.folder / "best" / "draftsmith.json").read_text())["step"] == 3
    assert json.loads((result.folder / "draft" / "draftsmith.json").read_text())["step"] == 4
    assert [tau for _, tau in quiet.records] == [1.5, 2.0, 2.0, 1.9]


def test_the_draft_folder_is_what_servers_read(demo_config: MakeConfig) -> None:
    result, _, _ = run_training(demo_config())
    config = json.loads((result.folder / "draft" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 4, 6, 7]
    assert config["dflash_config"]["mask_token_id"] == 5
    assert "is_causal" not in config
    with safe_open(result.folder / "draft" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"} <= names
