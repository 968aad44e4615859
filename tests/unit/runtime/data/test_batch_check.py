"""Another batch for a repeated iteration is an error, in a survivor and in a replacement."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import torch

from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.errors import ChangedBatchError, UsageError
from swift_ft.runtime.data import check
from swift_ft.runtime.data.check import BatchBoard, BatchCheck
from swift_ft.runtime.data.digest import BatchDigest
from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_core.tensors import storage_id


class Rendezvous:
    """The part of the rendezvous store that is used, and of its background writer."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def set_json(self, key: str, value: object) -> None:
        self.values[key] = json.dumps(value)

    def delete(self, key: str) -> None:
        del self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


class Worker:
    """A process of a worker, which gives batches to its model."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        joined: bool = False,
        iterators: tuple[str, ...] = (),
        further: tuple[str, ...] = (),
    ) -> None:
        store, writer = cast(RendezvousStore, rendezvous), cast(BackgroundWriter, rendezvous)
        board = BatchBoard(store, writer, 3, joined=joined)
        self.ahead: dict[int, tuple[str, torch.Tensor]] = {}
        self.waits = AbortableWaits()
        self.check = BatchCheck(
            board,
            enabled=True,
            keep=20,
            iterators=lambda: iterators,
            further_iterators=lambda: further,
            kept_ahead=lambda: self.ahead,
            in_doubt=lambda: self.waits.in_doubt,
        )
        self.waits.before_abort = self.check.settle

    def step(self, iteration: int, *batches: int, committed: int = 0, reads: bool = False) -> None:
        self.check.begin(iteration, committed)
        if reads:
            self.check.index_read()
        for batch in batches:
            self.check.given(((torch.tensor([batch]),), {}))
        self.check.end()


def test_what_is_handed_to_the_writer_does_not_change_any_more() -> None:
    """It is turned into JSON later, in another thread."""

    class Kept(Rendezvous):
        """Keeps the objects themselves, and what they were."""

        def __init__(self) -> None:
            super().__init__()
            self.handed: list[tuple[Any, str]] = []

        def set_json(self, key: str, value: object) -> None:
            super().set_json(key, value)
            self.handed.append((value, self.values[key]))

    rendezvous = Kept()
    worker = Worker(rendezvous)
    for iteration in range(3):
        worker.step(iteration, iteration, iteration + 10)
    assert len(rendezvous.handed) >= 6
    assert [json.dumps(value) for value, _ in rendezvous.handed] == [text for _, text in rendezvous.handed]
    Worker(rendezvous, joined=True).step(1, 1, 11)
    with pytest.raises(ChangedBatchError):
        Worker(rendezvous, joined=True).step(1, 1, 12)


def test_the_same_batch_again() -> None:
    worker = Worker(Rendezvous())
    for iteration in (0, 1, 2, 2, 1, 2, 3):
        worker.step(iteration, iteration)


def test_another_batch() -> None:
    worker = Worker(Rendezvous())
    worker.step(0, 0)
    worker.step(1, 1)
    worker.check.interrupted()
    with pytest.raises(ChangedBatchError, match=r"Iteration 1 is repeated .* step\.index"):
        worker.step(1, 2)


class OnDevice(BatchDigest):
    """Of a batch on a device, which gets there when the test says so."""

    here = True

    @property
    def ready(self) -> bool:
        return OnDevice.here


@pytest.fixture
def over_nccl(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker with batches that others have sent, and that is interrupted by an abort."""
    monkeypatch.setattr(check, "BatchDigest", OnDevice)
    worker = Worker(Rendezvous())
    worker.step(0, 0)
    worker.waits.silent = True
    worker.waits.begun()
    return worker


@pytest.mark.parametrize("arrives", ["before the abort", "after it", "never in this step"])
def test_a_batch_that_an_abort_may_have_changed_is_not_the_iterations(
    arrives: str, over_nccl: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated step has the right one, and would be blamed for it."""
    monkeypatch.setattr(OnDevice, "here", False)
    over_nccl.check.begin(1, 0)
    over_nccl.check.given(torch.tensor([1]))
    if arrives == "before the abort":
        OnDevice.here = True
    over_nccl.waits.abort()
    if arrives == "after it":
        OnDevice.here = True
        over_nccl.check.given(torch.tensor([2]))  # of another microbatch: publishes what has arrived
    over_nccl.waits.abort()  # once more, when the step ends
    over_nccl.check.end()
    over_nccl.check.interrupted()
    over_nccl.waits.renew()
    OnDevice.here = True
    if arrives == "before the abort":
        with pytest.raises(ChangedBatchError):
            over_nccl.step(1, 3)
    else:
        over_nccl.step(1, 3)


def test_the_batch_of_a_complete_iteration_counts_after_an_abort(
    over_nccl: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnDevice, "here", False)
    over_nccl.step(1, 1)
    over_nccl.check.begin(2, 0)
    over_nccl.waits.abort()
    over_nccl.check.end()
    over_nccl.check.interrupted()
    over_nccl.waits.renew()
    with pytest.raises(ChangedBatchError):
        over_nccl.step(1, 3)


def test_over_gloo_an_aborted_step_had_its_batch(over_nccl: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnDevice, "here", False)
    over_nccl.waits.silent = False
    over_nccl.check.begin(1, 0)
    over_nccl.check.given(torch.tensor([1]))
    over_nccl.waits.abort()
    over_nccl.check.interrupted()
    with pytest.raises(ChangedBatchError):
        over_nccl.step(1, 3)


def test_the_second_batch_of_an_iteration() -> None:
    """One that was interrupted between two forwards may have a new second batch, once."""
    worker = Worker(Rendezvous())
    worker.step(4, 40)
    worker.step(4, 40, 41)
    worker.step(4, 40, 41)
    with pytest.raises(ChangedBatchError):
        worker.step(4, 40, 42)


def test_outside_of_a_step() -> None:
    """A validation after the step's block takes what it likes."""
    worker = Worker(Rendezvous())
    for batch in (7, 8):
        worker.step(0, 0)
        worker.check.given(torch.tensor([batch]))


def test_switched_off() -> None:
    worker = Worker(Rendezvous())
    worker.check.enabled = False
    worker.step(0, 0)
    worker.step(0, 1)


def test_a_replacement_knows_what_the_lost_worker_had() -> None:
    rendezvous = Rendezvous()
    lost = Worker(rendezvous)
    for iteration in range(60, 70):  # two chunks of the board
        lost.step(iteration, iteration)
    for iteration, other in ((60, 0), (63, 1), (64, 2), (69, 3)):
        replacement = Worker(rendezvous, joined=True)
        replacement.step(62, 62)
        with pytest.raises(ChangedBatchError):
            replacement.step(iteration, other)
    replacement.step(70, 70)  # what it adds keeps what is there
    with pytest.raises(ChangedBatchError):
        Worker(rendezvous, joined=True).step(68, 1)


def lost_in(iterations: int, *, constant: bool = False) -> Rendezvous:
    """Published by a worker that was lost after some iterations."""
    rendezvous = Rendezvous()
    lost = Worker(rendezvous)
    for iteration in range(iterations):
        lost.step(iteration, 0 if constant else iteration)
    return rendezvous


def test_a_replacement_that_begins_with_the_first_batch_of_all() -> None:
    """The lost worker never came to the iteration, so there is no digest to compare with."""
    with pytest.raises(ChangedBatchError, match="the very first batch again, for iteration 5"):
        Worker(lost_in(5), joined=True).step(5, 0)


@pytest.mark.parametrize(
    ("constant", "arguments"),
    [
        pytest.param(False, {"reads": True}, id="the first batch of another epoch, by index"),
        pytest.param(True, {}, id="always the same batch"),
    ],
)
def test_the_first_batch_may_come_again(constant: bool, arguments: dict[str, Any]) -> None:
    """A function's iterator proves nothing."""
    Worker(lost_in(5, constant=constant), joined=True, further=("name.of",)).step(5, 0, **arguments)


def test_a_script_that_reads_the_index_for_something_else() -> None:
    """Its batches come from an iterator all the same."""
    with pytest.raises(ChangedBatchError, match="the very first batch again, for iteration 5"):
        Worker(lost_in(5), joined=True, iterators=("data",)).step(5, 0, reads=True)


@pytest.mark.parametrize("reads", [True, False])
def test_a_warning_in_the_first_steps(reads: bool, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(Rendezvous(), iterators=("data",), further=("get.data",))
    for iteration in range(4):
        worker.step(iteration, iteration, reads=reads)
    assert [r.__dict__["event"] for r in caplog.records] == ["batches_of_iterator"]
    assert "(data, get.data)" in caplog.text
    assert ("batches may come" in caplog.text) == reads


def test_a_batch_that_was_kept_ahead() -> None:
    """From the second step on; one that is always the same is no batch."""
    worker = Worker(Rendezvous())

    def step(iteration: int, given: torch.Tensor, kept: torch.Tensor) -> None:
        worker.ahead = {storage_id(one): ("self.next", one) for one in (constant, kept)}
        worker.check.begin(iteration, 0)
        worker.check.given(((given[:1], constant), {}))
        worker.check.end()

    constant, batches = torch.ones(2), [torch.full((2,), float(index)) for index in range(8)]
    step(0, batches[0], batches[0])
    step(1, batches[1], batches[2])
    with pytest.raises(UsageError, match=r"self\.next holds a batch .* step\.index"):
        step(2, batches[3], batches[3])


@pytest.mark.parametrize(
    ("reads", "iterators", "warnings"), [(True, (), 0), (False, (), 1), (True, ("data",), 1)]
)
def test_a_resumed_script(
    reads: bool, iterators: tuple[str, ...], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """There is nothing to compare with."""
    worker = Worker(Rendezvous(), iterators=iterators)
    for iteration in (300, 301):
        worker.step(iteration, iteration, reads=reads)
    events = [r.__dict__["event"] for r in caplog.records if r.__dict__["event"] != "batches_of_iterator"]
    assert events == ["batch_position_unknown"] * warnings


def test_what_is_not_needed_is_deleted() -> None:
    rendezvous = Rendezvous()
    worker = Worker(rendezvous)
    for iteration in range(200):
        worker.step(iteration, iteration, committed=iteration // 50 * 50)
    assert sorted(rendezvous.values) == ["batches/3/2", "batches/3/3", "batches/3/first", "batches/3/last"]


def test_a_batch_that_is_dealt_otherwise() -> None:
    """What a repeated iteration had before counts only if it was dealt as it is now."""
    rendezvous = Rendezvous()
    worker = Worker(rendezvous)
    for iteration in range(4):
        worker.step(iteration, iteration)
    changes = [(3, (1, 2))]
    worker.check.follow(changes)
    worker.step(3, 33)
    worker.step(4, 44)
    for again in (worker, Worker(rendezvous, joined=True)):
        again.check.follow(changes)
        again.step(3, 33)
        again.step(2, 2)
        with pytest.raises(ChangedBatchError):
            again.step(4, 4)
