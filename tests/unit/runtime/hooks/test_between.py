"""What a script does between two steps: what is noted, taken over, put back and refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from swift_ft.checkpoint.step.namespaces import Namespace
from swift_ft.checkpoint.step.noted import NotedVariables
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import RecoveryError, UsageError
from swift_ft.runtime.hooks.between import Between, Hook, OnLoss
from swift_ft.runtime.script.script_phases import ScriptPhase, ScriptPhases
from swift_ft.torch_adapters.script_operations import Operation
from tests.support.writers import AtOnce


class Store:
    """A rendezvous store that does not wait."""

    def __init__(self) -> None:
        self.content: dict[str, str] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.content for key in keys)

    def get(self, key: str) -> bytes:
        return self.content[key].encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.content.get(key, "") == expected:
            self.content[key] = desired
        return self.content[key].encode()


class Worker:
    """One that trains a layer, with a scheduler."""

    def __init__(self, store: Store, rank: int = 0, run: str = "run-0") -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        self.plateau = plateau(self.optimizer, factor=0.5, patience=0)
        parts = {"model": self.model, "optimizer": self.optimizer, "plateau": self.plateau}
        self.phases = ScriptPhases()
        self.differed = False
        self.best, self.level = 0.0, 1.0  # variables of the script
        self.between = Between(
            rank,
            TrainingState(parts),
            store,  # type: ignore[arg-type]
            AtOnce(store),
            run=run,
            seed=0,
            note_variables=self._note_best,
            on_difference=self._differs,
        )

    def _differs(self) -> None:
        self.differed = True

    def _note_best(self) -> NotedVariables:
        here = Namespace("", self)
        slots = [(here, "best"), (here, "level")]
        return NotedVariables([], slots, [self.best, self.level], [], {}, {}, {})

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def add(
        self, function: Callable[[], Any], every: int = 1, *, then: Any = None, skip: bool = False
    ) -> None:
        self.between.add(Hook(function, every, then, OnLoss.SKIP if skip else OnLoss.REPEAT))

    def run(self, iteration: int, position: int = 0, generation: int = 1) -> None:
        self.phases.phase = ScriptPhase.HOOK
        self.between.run(iteration, position, generation, self.phases, lambda: None)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def worker(store: Store) -> Worker:
    return Worker(store)


def test_what_is_due(worker: Worker) -> None:
    worker.add(int, 2)
    worker.add(float, 3)
    assert [len(worker.between.due(i)) for i in range(7)] == [0, 0, 1, 1, 1, 0, 2]


def test_a_replay_takes_over_what_followed(store: Store, worker: Worker) -> None:
    worker.plateau.step(0.1)
    worker.add(lambda: torch.tensor(0.5), then=worker.plateau.step)
    worker.run(1)
    assert worker.rate == 0.5
    replaying = Worker(store)
    replaying.plateau.step(0.1)
    replaying.add(lambda: pytest.fail("it was called"), then=replaying.plateau.step)
    replaying.between.take_over(1, 1)
    assert replaying.rate == 0.5
    assert replaying.plateau.state_dict() == worker.plateau.state_dict()
    with pytest.raises(RecoveryError, match="after iteration 1 was not noted"):
        replaying.between.take_over(2, 1)


def test_numbers_keep_all_their_bits(store: Store, worker: Worker) -> None:
    results = [0.1 + 0.2, float("nan"), float("-inf"), 2**70, None, True, "text", [1, {"a": 1e-320}]]
    seen: list[Any] = []
    worker.add(lambda: results, then=seen.append)
    worker.run(1)
    worker.between.take_over(1, 1)
    assert repr(seen) == repr([results, results])


def test_the_way_back(worker: Worker) -> None:
    """To the state before a hook, however many of them are done."""
    for _ in range(3):
        worker.add(lambda: 1.0, then=worker.plateau.step)
    worker.plateau.step(0.1)
    before = worker.plateau.state_dict()
    rates = []
    for position in range(3):
        rates.append(worker.rate)
        worker.run(4, position)
    worker.between.go_back(5, 0)
    assert worker.rate == 0.125  # nothing was done after iteration 4
    worker.between.go_back(4, 1)
    assert worker.rate == rates[1]
    worker.between.go_back(4, 0)
    assert worker.rate == rates[0]
    assert worker.plateau.state_dict() == before


def test_variables_go_the_way_back(worker: Worker, store: Store) -> None:
    """Of hooks that ran and of results that were taken over; a complete iteration may be taken back."""

    def count(of: Worker, _: object = None) -> None:
        of.best += 1

    replaying = Worker(store)
    for one in (worker, replaying):
        one.add(partial(count, one))
        one.add(int, then=partial(count, one))
    worker.run(1, 0)
    worker.run(1, 1)
    worker.run(2, 0)
    worker.between.go_back(1, 1)
    assert worker.best == 1
    worker.run(1, 1)
    replaying.between.take_over(1, 2)
    assert replaying.best == 1
    replaying.between.go_back(1, 0)
    assert replaying.best == 0


def test_what_the_script_sets_after_a_function_stays(worker: Worker) -> None:
    """As at the top of an epoch, which follows the function before it and is not begun again."""

    def count() -> None:
        worker.best += 1

    worker.add(count)
    worker.run(1)
    worker.level = 2.0
    worker.between.go_back(1, 0)
    assert (worker.best, worker.level) == (0.0, 2.0)


def test_variables_after_an_interruption(worker: Worker) -> None:
    def breaks() -> None:
        worker.best = 1.0
        raise RuntimeError("a connection broke")

    worker.add(breaks)
    with pytest.raises(RuntimeError, match="broke"):
        worker.run(1)
    worker.between.interrupted()
    assert worker.best == 0


@pytest.fixture
def grad_mode() -> Iterator[None]:
    """What a test leaves is put back."""
    yield
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("grad_mode")
def test_torchs_modes_after_an_interruption(worker: Worker) -> None:
    """An evaluation that sets them without a `with` has not come to the line that sets them back."""

    def validate() -> None:
        torch.set_grad_enabled(False)
        raise RuntimeError("a connection broke")

    worker.add(validate, skip=True)
    with pytest.raises(RuntimeError, match="broke"):
        worker.run(1)
    worker.between.interrupted()
    assert torch.is_grad_enabled()


@pytest.mark.usefixtures("grad_mode")
def test_torchs_modes_go_the_way_back(worker: Worker) -> None:
    """Those that a function has set, and not those of the script since."""
    torch.set_grad_enabled(False)
    worker.add(lambda: torch.set_grad_enabled(True) and None)
    worker.add(int)
    worker.run(1, 0)
    worker.run(1, 1)
    worker.between.go_back(1, 0)
    assert not torch.is_grad_enabled()
    worker.run(1, 0)
    worker.run(1, 1)
    torch.set_grad_enabled(False)
    worker.between.go_back(1, 1)
    assert not torch.is_grad_enabled()


def test_a_repetition_has_the_last_word(store: Store, worker: Worker) -> None:
    results = iter([1.0, 2.0])
    seen: list[float] = []
    worker.add(lambda: next(results), then=seen.append)
    worker.run(1, generation=1)
    worker.run(1, generation=3)
    worker.between.take_over(1, 1)
    assert seen == [1.0, 2.0, 2.0]


def test_what_is_skipped_is_skipped_in_replays_too(store: Store, worker: Worker) -> None:
    seen: list[float] = []
    worker.add(lambda: 1.0, then=seen.append, skip=True)
    worker.run(1)
    worker.between.repeats = True
    worker.run(1, generation=2)
    worker.between.take_over(1, 1)
    assert seen == [1.0]


def test_modes_and_buffers_after_an_interruption(worker: Worker) -> None:
    def validate() -> None:
        worker.model.eval()
        worker.model[1].running_mean.add_(1)  # type: ignore[operator]
        raise RuntimeError("a connection broke")

    worker.add(validate)
    with pytest.raises(RuntimeError, match="broke"):
        worker.run(1)
    worker.between.interrupted()
    assert all(module.training for module in worker.model.modules())
    assert not worker.model[1].running_mean.any()  # type: ignore[operator]


def test_modes_are_put_back(worker: Worker) -> None:
    worker.add(lambda: worker.model.eval() and None)
    worker.run(1)
    assert all(module.training for module in worker.model.modules())


CHANGES: dict[str, Callable[[Worker], object]] = {
    "plateau": lambda worker: worker.plateau.step(1.0),
    "the hyper-parameters of optimizer": lambda worker: worker.optimizer.param_groups[0].update(lr=0.1),
    "model.0.weight": lambda worker: next(worker.model.parameters()).add_(1),
    "the buffers of model": lambda worker: worker.model(torch.randn(4, 2)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_no_replay_would_see(what: str, worker: Worker) -> None:
    def changes() -> None:
        with torch.no_grad():
            CHANGES[what](worker)

    worker.add(changes)
    with pytest.raises(UsageError, match=rf"changes\(\) is done between two steps and changed {what}"):
        worker.run(1)


WRITES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "into its memory": lambda weight: weight.data.copy_(torch.full((2, 2), 3.0)),
    "by another tensor": lambda weight: setattr(weight, "data", torch.full((2, 2), 3.0)),
    "into a view of it": lambda weight: weight.detach().view(-1).data.fill_(3.0),
}
"""None of which a parameter counts."""


@pytest.mark.parametrize("how", WRITES)
def test_averaged_weights_that_an_interruption_has_left(how: str, worker: Worker) -> None:
    """A repetition would take them for those of the training, and keep them."""

    def validate() -> None:
        WRITES[how](worker.model[0].weight)  # type: ignore[arg-type]
        raise RuntimeError("a connection broke")

    worker.add(validate)
    assert worker.between.dirty() is None
    with pytest.raises(RuntimeError, match="broke"):
        worker.run(1)
    dirty = worker.between.dirty()
    assert dirty is not None
    assert re.search(r"in .*validate\(\) while model\.0\.weight had other values", dirty)
    worker.between.interrupted()
    assert worker.between.dirty() is None


def test_averaged_weights_that_are_taken_out_again(worker: Worker) -> None:
    """Whether the function ends or is interrupted."""
    weight = worker.model[0].weight.data

    def validate() -> None:
        own = weight.clone()  # type: ignore[operator]
        try:
            weight.fill_(3.0)  # type: ignore[operator]
            if breaks:
                raise RuntimeError("a connection broke")
        finally:
            weight.copy_(own)  # type: ignore[operator]

    breaks = False
    worker.add(validate)
    worker.run(1)
    breaks = True
    with pytest.raises(RuntimeError, match="broke"):
        worker.run(2)
    assert worker.between.dirty() is None


@pytest.mark.parametrize("how", WRITES)
def test_averaged_weights_that_stay(how: str, worker: Worker) -> None:
    worker.add(lambda: WRITES[how](worker.model[0].weight))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"is done between two steps and changed model\.0\.weight"):
        worker.run(1)


def test_results_that_differ(store: Store) -> None:
    for rank in (0, 1):
        worker = Worker(store, rank)
        worker.add(partial(int, rank), then=lambda _: None)
        worker.run(1)
        if rank:
            with pytest.raises(UsageError, match=r"returned 1 on worker 1 and 0 on another one"):
                worker.between.check()
        else:
            worker.between.check()
        assert worker.differed == bool(rank)


def test_a_result_that_is_no_text(worker: Worker) -> None:
    worker.add(lambda: torch.ones(2), then=lambda _: None)
    with pytest.raises(UsageError, match="returned Tensor"):
        worker.run(1)


def test_other_functions_on_another_worker(store: Store) -> None:
    one, other = Worker(store), Worker(store, 1)
    one.add(int, 2)
    other.add(int, 3)
    one.between.agree()
    with pytest.raises(UsageError, match="all workers must be given the same"):
        other.between.agree()


def test_random_numbers_of_a_part_leave_those_of_the_host_alone(worker: Worker) -> None:
    """A replay does not call it, and goes on with the same numbers."""
    worker.add(random.random)
    random.seed(5)
    expected = random.random()
    random.seed(5)
    worker.run(1)
    assert random.random() == expected


class Log:
    """Of the results."""

    def __init__(self, **content: str) -> None:
        self.content = content

    def note(self, iteration: int, position: int, result: str) -> None:
        self.content[f"i{iteration}p{position}"] = result

    def read(self, iteration: int, position: int) -> str | None:
        return self.content.get(f"i{iteration}p{position}")


def test_results_are_in_the_log_for_a_replay_without_the_job(store: Store) -> None:
    live, log, seen = Worker(store), Log(), list[object]()
    live.between.log = log
    live.add(lambda: [0.5, "x"], every=2, then=seen.append)
    live.run(2)
    assert log.content == {"i2p0": '[0.5, "x"]'}
    offline = Worker(Store(), rank=1)
    offline.between.log = log
    offline.add(list, every=2, then=seen.append)
    offline.between.take_over(2, 1)
    assert seen == [[0.5, "x"], [0.5, "x"]]
    with pytest.raises(RecoveryError, match="after iteration 3 was not noted"):
        offline.between.take_over(4, 1)


def test_what_a_replay_takes_over_is_in_its_own_log_too(store: Store) -> None:
    live, replaying, log = Worker(store), Worker(store, rank=1), Log()
    for one in (live, replaying):
        one.add(lambda: 7, then=lambda _: None)
    live.run(1)
    replaying.between.log = log
    replaying.between.take_over(1, 1)
    assert log.content == {"i1p0": "7"}


def test_an_operation_of_a_step_is_waited_for_in_it(worker: Worker) -> None:
    phases, operation = worker.phases, Operation("allreduce", "0", (0, 1), ())
    phases.begin_step()
    in_time, late, later = (phases.begin(operation) for _ in range(3))
    assert in_time is not None
    assert late is not None
    assert later is not None
    in_time()
    phases.phase = ScriptPhase.OUTSIDE
    with pytest.raises(
        UsageError, match=r"test_between\.py:\d+ .* waits for allreduce, which began in a step"
    ):
        late()
    phases.begin_step()
    with pytest.raises(UsageError, match="which began in a step that is over"):
        later()


def test_what_follows_must_not_communicate(worker: Worker) -> None:
    def follows(_: object) -> None:
        worker.phases.begin(Operation("allreduce", "0", (0, 1), ()))

    worker.add(int, then=follows)
    with pytest.raises(UsageError, match=r"py:\d+ \(follows\) calls allreduce between two steps"):
        worker.run(1)


@pytest.mark.parametrize("run", ["run-0", "run-1"])
def test_a_stop_holds_for_its_run(
    run: str, store: Store, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever is rebuilt in that run ends there as well; who resumes was started to go on."""
    worker.between.stop.at = 6
    caplog.set_level("INFO")
    later = Worker(store, run=run).between
    later.stop.load_state_dict(worker.between.stop.state_dict())
    resumed = run == "run-1"
    assert later.stop.at == (None if resumed else 6)
    later.stop.load_state_dict(later.stop.state_dict())  # a step that is put back
    later.say_if_stopped_before(5, 8)
    later.say_if_stopped_before(6, 6)
    assert not caplog.records  # none is left
    for steps in (8, None):
        later.say_if_stopped_before(6, steps)
    assert [record.message.partition(".")[0] for record in caplog.records] == (
        ["The run before was stopped after 6 iterations"] if resumed else []
    )
    later.stop.at = 9
    third = Worker(store, run=run).between
    third.stop.load_state_dict(later.stop.state_dict())
    assert third.stop.at == 9
