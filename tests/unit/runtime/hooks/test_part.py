"""A function between two steps whose communication an abort has ended without a word, as over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.runtime.hooks.part import HooksPart
from swift_ft.runtime.worker.part import Interruption
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.comm_errors import interruption_of
from swift_ft.torch_adapters.device_waits import DeviceWaits
from swift_ft.torch_adapters.lasting_work import LastingWork
from tests.unit.runtime.hooks.test_between import Store, Worker


class Survivor:
    """A worker that validates between two steps, together with others.

    Args:
        validate: called with what an abort of the group does.
    """

    def __init__(self, store: Store, rank: int, validate: Callable[[Callable[[], None]], Any]) -> None:
        self.worker = Worker(store, rank)
        self.seen: list[Any] = []
        self.waits = AbortableWaits()
        self.waits.silent = True
        self.worker.add(lambda: validate(self.waits.abort), then=self.seen.append)
        progress: Any = SimpleNamespace(publish=lambda *_: None)
        self.status = WorkerStatus()
        self.part = HooksPart(
            self.status,
            self.worker.between,
            self.worker.phases,
            progress,
            lambda _: None,
            interruption_of,
            DeviceWaits(self.waits, list),
        )

    def do(self, generation: int) -> str | None:
        """The function after the first iteration. Returns why it was interrupted."""
        LastingWork.waits = self.waits
        try:
            return self.part.do(1, 0, generation)
        finally:
            LastingWork.waits = None


@pytest.fixture
def store() -> Store:
    return Store()


def test_a_number_that_an_abort_has_left_is_not_noted(store: Store) -> None:
    """Each survivor has read another one: the script would be blamed for that."""

    def validation(rank: int) -> Callable[[Callable[[], None]], float]:
        def validate(abort: Callable[[], None]) -> float:
            if generation == 1:
                abort()  # item() returns what is in the memory then
                return 0.25 + rank
            return 0.5

        return validate

    generation = 1
    survivors = [Survivor(store, rank, validation(rank)) for rank in range(2)]
    for survivor in survivors:
        assert "aborted" in str(survivor.do(1))
    assert store.content == {}
    for survivor in survivors:
        assert survivor.seen == []
        survivor.worker.between.interrupted()
        survivor.waits.renew()
        survivor.waits.silent = True
    generation = 2
    assert [survivor.do(2) for survivor in survivors] == [None, None]
    assert [survivor.seen for survivor in survivors] == [[0.5], [0.5]]
    for survivor in survivors:
        survivor.worker.between.check()


@pytest.mark.parametrize(
    "error",
    [ValueError("the loss is not finite"), UsageError("that file is not the last one"), SystemExit(3)],
    ids=repr,
)
def test_an_error_of_such_a_number_is_not_the_scripts(error: BaseException, store: Store) -> None:
    def validate(abort: Callable[[], None]) -> float:
        abort()
        raise error

    survivor = Survivor(store, 0, validate)
    assert "aborted" in str(survivor.do(1))
    assert store.content == {}


def test_an_error_without_an_abort_is_the_scripts(store: Store) -> None:
    def validate(_: Callable[[], None]) -> float:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        Survivor(store, 0, validate).do(1)


def test_what_follows_from_a_result_is_not_asked_of_a_later_abort(store: Store) -> None:
    survivor = Survivor(store, 0, lambda _: 0.5)

    def follow(_: float) -> None:
        survivor.waits.abort()
        raise ValueError("a fault of the script")

    survivor.worker.between._hooks.clear()
    survivor.worker.add(lambda: 0.5, then=follow)
    with pytest.raises(ValueError, match="a fault of the script"):
        survivor.do(1)


@pytest.mark.parametrize("in_step", [False, True])
def test_averaged_weights_make_the_state_one_that_nobody_goes_on_from(in_step: bool, store: Store) -> None:
    def validate(abort: Callable[[], None]) -> float:
        survivor.worker.model[0].weight.data.fill_(3.0)  # type: ignore[operator]
        abort()
        return 0.0

    survivor = Survivor(store, 0, validate)
    assert survivor.do(1) is not None
    survivor.part.interrupted(Interruption(in_step=in_step))
    assert (survivor.status.dirty is None) == in_step
