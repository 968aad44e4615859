"""Wrappers of other libraries around models and optimizers: the state is that of what they wrap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

import swift_ft
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.wrappers import unwrapped_model, unwrapped_optimizer, wrapped_ddp


@pytest.fixture
def ddp(one_process: None) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2))


class Wrapper(nn.Module):
    """As Lightning Fabric's: it saves under the names of the module that DDP wraps."""

    def __init__(self, forward_module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module, self._original_module = forward_module, original

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._original_module.state_dict(*args, **kwargs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch.compile imports it
def test_a_model_that_is_wrapped(ddp: DistributedDataParallel) -> None:
    assert unwrapped_model(Wrapper(ddp, ddp.module)) is ddp
    assert unwrapped_model(ddp) is ddp
    compiled: Any = torch.compile(ddp)
    assert unwrapped_model(compiled) is ddp
    assert TrainingState({"model": Wrapper(ddp, ddp.module)}).modules == {"model": ddp}


def test_a_module_that_has_more_than_ddp(ddp: DistributedDataParallel) -> None:
    both = nn.Sequential(ddp, nn.Linear(2, 2))
    assert unwrapped_model(both) is both
    assert wrapped_ddp(both) is None


def test_an_average_of_a_ddp_model(ddp: DistributedDataParallel) -> None:
    """It counts the models in a buffer of its own, which is a part of the state."""
    averaged: Any = AveragedModel(ddp)
    averaged.update_parameters(ddp)
    assert unwrapped_model(averaged) is averaged
    assert TrainingState({"average": averaged}).modules == {"average": averaged}
    saved = TrainingState({"average": averaged}).to_save()["models"]["average"]
    assert saved["n_averaged"] == 1
    assert wrapped_ddp(averaged) is averaged.module


def test_a_wrapper_whose_state_could_not_be_loaded() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"'model' is a Wrapper, which saves 'weight' .*model\.module"):
        swift_ft.Session({"model": Wrapper(model, model)}, store="memory://nowhere")


class Shell(Optimizer):
    """As accelerate's: it never becomes one of torch's optimizers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)


class Lookahead(Optimizer):
    """Has slow weights of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_an_optimizer_that_is_wrapped() -> None:
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    assert hasattr(plain, "_optimizer_step_post_hooks")
    assert unwrapped_optimizer(Shell(plain)) is plain
    assert unwrapped_optimizer(Shell(Shell(plain))) is plain
    assert TrainingState({"optimizer": Shell(plain)}).optimizers == {"optimizer": plain}


def test_an_optimizer_with_a_state_of_its_own() -> None:
    outer = Lookahead(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    assert unwrapped_optimizer(outer) is outer
