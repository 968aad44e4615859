"""An interrupted recovery leaves a survivor with the state it had, and a correct report of it (paper §4)."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.optim import wrap_optimizer
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.plan import Plan, RecoveryMode, Task
from swift_ft.recovery.reconcile import Transfer
from swift_ft.runtime.replicas.part import ReplicasPart
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.replicas.state_sync import StateSync
from swift_ft.runtime.replicas.updates import Updates
from swift_ft.runtime.state_part import LocalState
from swift_ft.runtime.worker.part import Interruption
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.torch_core.tensors import same_bits

MODEL = object()


def test_an_update_is_undone_once() -> None:
    """The plan after an interrupted one names it again, since it is no longer the original."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    replicas = Updates(TrainingState({"model": model, "optimizer": optimizer}))
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        replicas.begin(0)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert replicas.updated() == (0, 1)
        replicas.undo(Task(None, 0, 0, undo=(0,)))
        replicas.undo(Task(None, 0, 0, undo=(0, 1)))
        for parameter, value in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.detach(), value)
        optimizer.zero_grad()


@pytest.mark.parametrize("averaged", [False, True])
def test_no_update_is_undone_that_an_average_holds(averaged: bool) -> None:
    model = torch.nn.Linear(3, 2)
    average = AveragedModel(model)
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    state = TrainingState({"model": model, "ema": average, "optimizer": optimizer})
    replicas = Updates(state)
    replicas.begin(0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if averaged:
        average.update_parameters(model)
    replicas.completed()
    assert replicas.undoable(1) == (None if averaged else (0, 1))
    replicas.begin(1)  # interrupted in it
    assert replicas.undoable(1) == (None if averaged else (0, 1))


@torch.no_grad()
def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(0.9)


@pytest.mark.parametrize("hooked", [False, True])
def test_no_plan_undoes_what_step_hooks_have_changed_before_there_was_a_copy(hooked: bool) -> None:
    """Else it would be ordered, and fail: one more round."""
    model = torch.nn.Linear(3, 2)
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), exact=True)
    if hooked:
        optimizer.register_step_pre_hook(decay)
    state = TrainingState({"model": model, "optimizer": optimizer})
    nothing: Any = None
    replicas: Any = Replicas(state, nothing, nothing, nothing, nothing, 0)
    replicas._hook = SimpleNamespace(begin=lambda *_, **__: None, buffers=SimpleNamespace(due=True))
    status = WorkerStatus()
    part: Any = ReplicasPart(status, replicas, nothing, nothing, tuple, pipelined=True, by_layer=False)
    report = StatusReported(rank=0, generation=1, iteration=1, live=True, pipeline_known=True)
    for iteration in range(2):  # in the second step, there is a copy
        refused = hooked and iteration == 0
        replicas.begin(iteration)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        status.dirty = None
        part.put_back(Interruption())
        assert (status.dirty is not None) == refused
        replicas.completed()
        optimizer.zero_grad()
        reported = replicas.updates.report_undo(replace(report, iteration=iteration + 1))
        assert reported.undoable == (() if refused else (0, 1))
        assert not reported.no_update


def test_parameters_without_an_optimizer_are_looked_for_when_there_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step walks through all modules. One that is new counts, or that an optimizer gets or gives up."""
    model, average = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = TrainingState({"model": model, "ema": average, "optimizer": optimizer})
    first = state.unowned_parameters()
    assert [*first] == [average.weight, average.bias]
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "named_modules", None)
        assert state.unowned_parameters() is first
    average.bias = torch.nn.Parameter(torch.ones(2))
    assert [*state.unowned_parameters()] == [average.weight, average.bias]
    optimizer.add_param_group({"params": [average.weight]})
    assert [*state.unowned_parameters()] == [average.bias]
    optimizer.param_groups[0]["params"] = [model.weight]
    assert [*state.unowned_parameters()] == [model.bias, average.bias]


def test_only_the_last_iteration_is_taken_back() -> None:
    """Of two optimizers, one skips its step; then both do."""
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizers = [wrap_optimizer(torch.optim.SGD(m.parameters(), lr=0.5)) for m in (first, second)]
    state = TrainingState({"a": first, "b": second, "one": optimizers[0], "two": optimizers[1]})
    replicas = Updates(state)
    assert replicas.undoable(0) is None
    for iteration, (stepping, undoable) in enumerate(
        [(2, (0, 1, 2, 3)), (1, (0, 1)), (0, ()), (2, (0, 1, 2, 3))]
    ):
        replicas.begin(iteration)
        for module, optimizer in list(zip((first, second), optimizers, strict=True))[:stepping]:
            optimizer.zero_grad()
            module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        replicas.completed()
        assert replicas.undoable(iteration + 1) == undoable
        assert replicas.undoable(iteration) is None
    replicas.undo(Task(None, 3, 3, undo=(0, 1, 2, 3), back=True))
    assert replicas.undoable(3) is None  # the iteration before had none, but that is long ago


@pytest.mark.parametrize("kind", ["added", "exchanged", "none"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_step_that_regroups_parameters_is_not_taken_back(kind: str, place: str) -> None:
    """Its indices would mean other parameters once the groups are as they were."""
    model, head = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), exact=True)
    state = TrainingState({"model": model, "head": head, "optimizer": optimizer})
    replicas = Updates(state)

    def regroup() -> None:
        if kind == "added":
            optimizer.add_param_group({"params": head.parameters()})
        if kind == "exchanged":
            optimizer.param_groups[0]["params"] = [*head.parameters()]

    for iteration, undoable in enumerate([(0, 1), (0, 1) if kind == "none" else None]):
        replicas.begin(iteration)
        if iteration == 1 and place == "before":
            regroup()
        optimizer.zero_grad()
        (model(torch.ones(1, 3)) + head(torch.ones(1, 3))).sum().backward()
        optimizer.step()
        if iteration == 1 and place == "after":
            regroup()
        replicas.completed()
        assert replicas.undoable(iteration + 1) == undoable
    replicas.begin(2)
    optimizer.zero_grad()
    (model(torch.ones(1, 3)) + head(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    replicas.completed()
    assert replicas.undoable(3) == ((0, 1, 2, 3) if kind == "added" else (0, 1))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_parameters_that_a_step_has_updated_and_its_beginning_lacks(whole: bool, added: bool) -> None:
    """No undo leads back, since groups go back first. Of a step that is verified there are copies of all."""
    model, head = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), exact=True)
    rollback = Rollback(TrainingState({"model": model, "head": head, "optimizer": optimizer}))
    status, sharded, nothing = WorkerStatus(), cast(Any, SimpleNamespace(reset=lambda: None)), cast(Any, None)
    state = LocalState(status, sharded, nothing, rollback, nothing, seed=0, data_of=None, first_life=True)
    before = copy.deepcopy([[*one.parameters()] for one in (model, head)])
    rollback.watch()
    rollback.begin(0, whole=whole)
    if added:
        optimizer.add_param_group({"params": head.parameters()})
    (model(torch.ones(1, 3)) + head(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    state.interrupted(Interruption())
    assert (status.dirty is not None) == (added and not whole)
    if whole:
        state.put_back(Interruption())
        assert not optimizer.updated
        assert (len(optimizer.param_groups), len(optimizer.state)) == (1, 0)
        for one, noted in zip((model, head), before, strict=True):
            assert all(map(same_bits, one.parameters(), noted))
    rollback.close()


class Survivor:
    """It was interrupted in iteration 47, after it had updated two parameters."""

    def __init__(self, *, breaks: bool, equal_buffers: bool = False) -> None:
        self.happened: list[str] = []
        self.status = WorkerStatus(47, known=True, updated=(0, 1))
        self._breaks = breaks
        self._sync = StateSync(
            0,
            self.status,
            cast(
                Any,
                SimpleNamespace(
                    recv_state=self._receive,
                    kept_variables=lambda *_, **__: contextlib.nullcontext(),
                    recv_parameters=self._receive,
                    equal_buffers=equal_buffers,
                    model=MODEL,
                ),
            ),
            cast(
                Any,
                SimpleNamespace(
                    has_buffers_of=lambda _: True,
                    buffers_of=self._put_back,
                ),
            ),
            cast(Any, SimpleNamespace(subgroup=lambda _: contextlib.nullcontext())),
            cast(Any, SimpleNamespace(publish=lambda *_: None)),
        )

    def _put_back(self, iteration: int, model: object) -> None:
        assert model is MODEL
        self.happened.append(f"own buffers of {iteration}")

    def _receive(self, *_: object, **__: object) -> None:
        if self._breaks:
            raise RuntimeError("Connection closed by peer")
        self.happened.append("received")

    def transfer(self, transfer: Transfer, resume: int) -> str | None:
        plan = Plan(RecoveryMode.REPLICA, resume, {0: Task(None, resume, resume)}, (transfer,))
        return self._sync.apply_transfers(plan)


def test_a_survivor_goes_forward_with_all_that_belongs_to_it() -> None:
    survivor = Survivor(breaks=False)
    assert survivor.transfer(Transfer(1, (0,)), 48) is None
    assert survivor.happened == ["received", "own buffers of 48"]
    assert survivor.status == WorkerStatus(48, known=True, fresh=False)


@pytest.mark.parametrize("resume", [46, 47])
def test_a_survivor_that_is_not_behind_keeps_its_buffers(resume: int) -> None:
    survivor = Survivor(breaks=False)
    survivor.transfer(Transfer(1, (0,)), resume)
    assert survivor.happened == ["received", f"own buffers of {resume}"]


def test_buffers_that_are_equal_on_all_replicas_come_with_the_state() -> None:
    survivor = Survivor(breaks=False, equal_buffers=True)
    survivor.transfer(Transfer(1, (0,)), 48)
    assert survivor.happened == ["received"]


@pytest.mark.parametrize("parameters", [None, (0,)])
def test_a_survivor_whose_source_dies_keeps_its_state(parameters: tuple[int, ...] | None) -> None:
    survivor = Survivor(breaks=True)
    assert survivor.transfer(Transfer(1, (0,), parameters), 48) == "Connection closed by peer"
    assert survivor.happened == []
    assert survivor.status == WorkerStatus(47, known=True, updated=(0, 1))


def test_what_was_copied_is_an_original_again() -> None:
    survivor = Survivor(breaks=False)
    survivor.transfer(Transfer(1, (0,), (1,)), 47)
    assert survivor.status.updated == (0,)
