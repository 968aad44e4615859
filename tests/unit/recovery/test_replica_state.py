"""A recovery that is broken off leaves a survivor with what it had, and the truth about it (paper §4)."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swift_ft.optim import wrap_optimizer
from swift_ft.recovery.exchange import Exchange, Standing
from swift_ft.recovery.ladder import Transfer
from swift_ft.recovery.plan import Plan, Task, Way
from swift_ft.recovery.replicated import Replicas
from swift_ft.recovery.state import TrainingState


class Updates:
    """As much of what replicas have in common as needs no group."""

    begin, updated, undo, _undoable = Replicas.begin, Replicas.updated, Replicas.undo, Replicas._undoable
    _note_windows, _indices = Replicas._note_windows, Replicas._indices

    def __init__(self, state: TrainingState) -> None:
        self._state, self._hook = state, None
        self._windows: dict[str, int] = {}
        self._undone: set[int] = set()


def test_an_update_is_taken_back_once() -> None:
    """The plan that follows a broken off one names it again, since it is no original any more."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    replicas: Any = Updates(TrainingState({"model": model, "optimizer": optimizer}))
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


class Survivor:
    """It was interrupted in iteration 47, after it had updated two parameters."""

    def __init__(self, *, breaks: bool) -> None:
        self.happened: list[str] = []
        self.standing = Standing(47, known=True, updated=(0, 1))
        self._breaks = breaks
        group = SimpleNamespace(part=lambda _: contextlib.nullcontext())
        self._exchange = Exchange(
            0,
            self.standing,
            cast(Any, SimpleNamespace(take_whole=self._take, take=self._take)),
            cast(Any, SimpleNamespace(forward=lambda: self.happened.append("buffers forward"))),
            cast(Any, SimpleNamespace(group=group, tell_progress=lambda *_: None)),
        )

    def _take(self, *_: object, **__: object) -> None:
        if self._breaks:
            raise RuntimeError("Connection closed by peer")
        self.happened.append("received")

    def transfer(self, transfer: Transfer, resume: int) -> str | None:
        plan = Plan(Way.REPLICA, resume, {0: Task(None, resume, resume)}, (transfer,))
        return self._exchange.carry_out(plan)


def test_a_survivor_goes_forward_with_all_that_belongs_to_it() -> None:
    survivor = Survivor(breaks=False)
    assert survivor.transfer(Transfer(1, (0,)), 48) is None
    assert survivor.happened == ["received", "buffers forward"]
    assert survivor.standing == Standing(48, known=True)


def test_a_survivor_that_is_not_behind_keeps_its_buffers() -> None:
    survivor = Survivor(breaks=False)
    survivor.transfer(Transfer(1, (0,)), 47)
    assert survivor.happened == ["received"]


@pytest.mark.parametrize("parameters", [None, (0,)])
def test_a_survivor_whose_source_dies_stays_where_it_is(parameters: tuple[int, ...] | None) -> None:
    survivor = Survivor(breaks=True)
    assert survivor.transfer(Transfer(1, (0,), parameters), 48) == "Connection closed by peer"
    assert survivor.happened == []
    assert survivor.standing == Standing(47, known=True, updated=(0, 1))


def test_what_was_copied_is_an_original_again() -> None:
    survivor = Survivor(breaks=False)
    survivor.transfer(Transfer(1, (0,), (1,)), 47)
    assert survivor.standing.updated == (0,)
