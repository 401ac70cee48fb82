"""What a checkpoint holds must be this run's, even where its checksums fit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conftest import tiny_drafter
from draftsmith.errors import InputError
from draftsmith.pipeline.optim import Optimizers, load_weights

State = dict[str, Tensor]


def stepped(kind: str) -> State:
    drafter = tiny_drafter()
    optimizers = Optimizers(drafter, kind, lr=1e-3, matrix_lr=1e-3, weight_decay=0.0)
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step(1.0)
    return optimizers.state()


def fresh(kind: str) -> Optimizers:
    return Optimizers(tiny_drafter(), kind, lr=1e-3, matrix_lr=1e-3, weight_decay=0.0)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_state_comes_back_whole(kind: str) -> None:
    state, again = stepped(kind), fresh(kind)
    again.load_state(state)
    assert again.state().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state().items())
    fresh(kind).load_state({})  # before the first step


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("fc.weight/exp_avg"), r"1 missing \(fc.weight/exp_avg\)"),
        (lambda s: s.update({"fc.weight": torch.zeros(1)}), r"1 unknown \(fc.weight\)"),
        (lambda s: s.update({"x/step": torch.tensor(0.0)}), r"1 unknown \(x/step\)"),
        (lambda s: s.update({"fc.weight/exp_avg": torch.zeros(2)}), r"fc.weight/exp_avg is \(2,\)"),
        (lambda s: s.update({"fc.weight/step": torch.tensor(1)}), "fc.weight/step is torch.int64"),
        (lambda s: s["fc.weight/exp_avg"].fill_(torch.nan), "fc.weight/exp_avg holds NaN"),
    ],
)
def test_state_of_another_optimizer_is_refused(change: Callable[[State], object], said: str) -> None:
    state = stepped("adamw")
    change(state)
    with pytest.raises(InputError, match=f"resume: the checkpoint's optimizer state: .*{said}"):
        fresh("adamw").load_state(state)


def test_muons_state_is_not_adamws() -> None:
    with pytest.raises(InputError, match="optimizer state: tensors"):
        fresh("muon").load_state(stepped("adamw"))


def test_weights_of_another_drafter_are_refused() -> None:
    drafter = tiny_drafter(seed=1)
    load_weights(drafter, tiny_drafter(seed=2).state_dict())
    assert torch.equal(drafter.fc.weight, tiny_drafter(seed=2).fc.weight)
    with pytest.raises(InputError, match=r"resume: the checkpoint's weights: fc.weight is"):
        load_weights(drafter, tiny_drafter(target_layer_ids=(0, 1)).state_dict())
    with pytest.raises(InputError, match=r"fc.weight is torch.float16, not torch.float32; remove this checkpoint"):
        load_weights(drafter, {name: tensor.half() for name, tensor in drafter.state_dict().items()})
