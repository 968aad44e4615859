"""Changes of modules by a function between two steps are noted, and put in place in a replay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.runtime.hooks.module_changes import ModuleChanges
from tests.support.writers import AtOnce


class Store(dict[str, bytes]):
    """A rendezvous store."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def delete_key(self, key: str) -> None:
        del self[key]


class Layer(torch.nn.Linear):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.seen = 0, list[float]()
        self.mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x.sum().item())
        self.mean = x.mean().detach()
        return super().forward(x)


class Worker:
    """One with a layer, and a variable of its own."""

    def __init__(self, store: Store) -> None:
        self.layer, self.best = Layer(), 0.0
        self.rollback = Rollback(TrainingState({"model": self.layer}))
        self.rollback.watch()
        rendezvous: object = store
        carried, writer = self.rollback.carried, AtOnce(store)
        self.changes = ModuleChanges(3, carried, rendezvous, writer, self.layer.modules, keep=20)  # type: ignore[arg-type]


@pytest.fixture
def both() -> Iterator[tuple[Worker, Worker]]:
    """The one that is lost, and one that replays in its place."""
    store = Store()
    workers = Worker(store), Worker(store)
    for one in workers:
        one.layer(torch.ones(2))
    yield workers
    for one in workers:
        one.rollback.close()


@pytest.mark.parametrize("again", [False, True])
def test_what_a_function_has_changed(both: tuple[Worker, Worker], again: bool) -> None:
    """Also in a later call, before which all was noted as well."""
    lost, new = both
    if again:
        lost.changes.begin("validate")
        lost.layer(torch.zeros(2))
        lost.changes.note("validate", 3, 0)
        new.changes.put("validate", 3, 0)
        assert new.layer.calls == 2
        lost.layer.calls, lost.layer.seen = 1, [2.0]
    lost.changes.begin("validate")
    lost.layer(torch.zeros(2))
    lost.layer.bias.requires_grad_(False)
    lost.best = 5.0
    lost.changes.note("validate", 4, 1)
    seen = new.layer.seen
    new.changes.put("validate", 4, 1)
    assert (new.layer.calls, new.layer.seen) == (2, [2.0, 0.0])
    assert new.layer.seen is seen
    assert new.layer.mean is not None
    assert new.layer.mean.item() == 0
    assert [one.requires_grad for one in new.layer.parameters()] == [True, False]
    assert new.best == 0  # `then` is for it


def test_a_value_that_is_again_the_first_one(both: tuple[Worker, Worker]) -> None:
    lost, new = both
    lost.changes.begin("validate")
    lost.layer.calls = 0
    lost.layer.seen.clear()
    lost.changes.note("validate", 4, 0)
    new.changes.put("validate", 4, 0)
    assert (new.layer.calls, new.layer.seen) == (0, [])


def test_a_function_that_changes_something_in_a_later_call(both: tuple[Worker, Worker]) -> None:
    """As one that evaluates each tenth time. From then on it is known."""
    lost, new = both
    for iteration, changes in enumerate((False, False, True, False, True)):
        lost.changes.begin("look")
        if changes:
            lost.layer(torch.zeros(2))
        lost.changes.note("look", iteration, 0)
        new.changes.put("look", iteration, 0)
        assert (new.layer.calls, new.layer.seen) == (lost.layer.calls, lost.layer.seen)


def test_what_is_skipped_after_a_loss(both: tuple[Worker, Worker]) -> None:
    lost, new = both
    lost.changes.begin("validate")
    lost.layer(torch.zeros(2))
    lost.changes.note("validate", 4, 0)
    lost.changes.note_skipped(4, 0)
    new.changes.put("validate", 4, 0)
    assert new.layer.calls == 1


def test_what_was_not_noted_is_said(both: tuple[Worker, Worker], caplog: pytest.LogCaptureFixture) -> None:
    lost, new = both
    lost.changes.begin("validate")
    lost.layer(torch.zeros(2))
    lost.layer.mean = torch.ones(2**15)
    lost.layer.calls = 7
    lost.changes.note("validate", 4, 0)
    new.changes.put("validate", 4, 0)
    assert new.layer.calls == 7
    assert "validate() is done between two steps" in caplog.text
    assert "what it changed in model.mean was too large to be noted" in caplog.text
    new.changes.put("save", 4, 1)
    assert "save() is done between two steps, and no replay calls it: there is no note" in caplog.text


def test_a_function_that_changes_nothing_costs_a_short_note(
    both: tuple[Worker, Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Notes are kept as long as a replay may ask for them."""
    lost, new = both
    for iteration in range(100):
        lost.changes.begin("look at the clock")
        lost.changes.note("look at the clock", iteration, 0)
    new.changes.put("look at the clock", 99, 0)
    assert not caplog.records
    store = new.changes._rendezvous
    assert isinstance(store, Store)
    assert len(store) == 21
    assert {*store.values()} == {b""}
