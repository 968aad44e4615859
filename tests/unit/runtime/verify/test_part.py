"""Steps that are computed again, in this process: hundreds of them alike, and the one that is not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.determinism import seed_step
from swift_ft.optim import wrap_optimizer
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import RecoveryRound, State
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.runtime.epoch_top import Epochs
from swift_ft.runtime.verify.part import OnCorruption, VerifyPart
from swift_ft.runtime.verify.verdict import Fault, Kind, Verdict
from swift_ft.runtime.worker.part import Interruption, StepInfo
from swift_ft.testing.scenario import Scenario
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output

pytestmark = pytest.mark.usefixtures("alone")


class Job:
    """Takes events."""

    def __init__(self) -> None:
        plan = Plan(RecoveryMode.START, 0)
        self.state = State(round=RecoveryRound(plan=plan))
        self.events: list[ev.Event] = []

    def append(self, event: ev.Event) -> State:
        self.events.append(event)
        return self.state


class Training:
    """One worker that trains a model with dropout and running statistics, and gives away its gradients."""

    def __init__(self, every: int, act: OnCorruption = OnCorruption.WARN, wrap: bool = True) -> None:
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.model = nn.Sequential(self.first, nn.BatchNorm1d(16), nn.Dropout(0.3), self.last)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = wrap_optimizer(optimizer) if wrap else optimizer
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.state = TrainingState(parts)
        self.every, self.rollback = every, Rollback(self.state)
        self.job = Job()
        self.epochs = Epochs()
        job, uncopied = cast("Any", self.job), self.rollback.uncopied
        self.verify = VerifyPart(0, self.state, job, self.epochs, every, act, uncopied)
        self._numbers = itertools.count()  # an iterator, since numbers are put back with the step
        self.wrong: tuple[int, ...] = ()  # of the computations so far, from 0

    @property
    def computed(self) -> int:
        return next(copy.copy(self._numbers))

    def step(self, iteration: int) -> None:
        if not self.every:  # as if there were no session
            seed_step(0, iteration, None)
            self._compute(iteration)
            return
        again = True
        while again:
            info = StepInfo(iteration, 1)
            info.computation = self.verify.computation(info)
            self.rollback.begin(iteration, whole=info.computation > 0)
            seed_step(0, iteration, None)
            self.verify.begin(info)
            self._compute(iteration)
            again = bool(info.computation) and self.verify.judge(info).again
            if again:
                self.rollback.back()
        self.rollback.completed()

    def _compute(self, iteration: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(iteration))
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        gradient = self.first.weight.grad
        assert gradient is not None
        number = next(self._numbers)
        if number in self.wrong:
            gradient.view(torch.int32)[-1, -1] ^= 1 << (12 + number % 4)
        outputs.show(Output("gradients", {"the gradient of 0.weight": gradient}))
        self.optimizer.step()
        self.scheduler.step()

    def digests(self) -> dict[str, int]:
        buffers = dict(self.model.named_buffers())
        return tensor_digests({**self.state.named_tensors(), **buffers})


@pytest.mark.parametrize("wrap", [True, False])
def test_hundreds_of_verified_steps_name_nobody_and_change_no_bit(wrap: bool) -> None:
    plain, verified = Training(0, wrap=wrap), Training(1, wrap=wrap)
    for iteration in range(300):
        plain.step(iteration)
        verified.step(iteration)
    assert (plain.computed, verified.computed) == (300, 599)  # all but the first one twice
    assert verified.job.events == []
    assert verified.digests() == plain.digests()
    assert plain.scheduler.get_last_lr() == verified.scheduler.get_last_lr()


@pytest.mark.parametrize("which", [0, 1])
def test_a_wrong_computation_does_not_count(which: int) -> None:
    plain, verified = Training(0), Training(4)
    verified.wrong = (3 + which,)
    for iteration in range(6):
        plain.step(iteration)
        verified.step(iteration)
    (found,) = verified.job.events
    assert isinstance(found, ev.StepDiffered)
    assert (found.iteration, found.ranks, found.kind, found.right) == (3, (0,), "once", True)
    assert "the gradient of 0.weight in gradients" in found.tensors
    assert verified.computed == 8
    assert verified.digests() == plain.digests()
    # The log has both versions: a checkpoint is to follow.
    assert "iteration 3" in verified.verify.why_checkpoint(3)
    assert verified.verify.why_checkpoint(4) == ""


def test_a_wrong_parameter_in_the_middle_of_a_step_is_put_right() -> None:
    plain, verified = Training(0), Training(2)
    handles: list[Any] = []

    def flip(_: torch.Tensor) -> None:
        handles.pop().remove()
        verified.last.weight.detach().view(torch.int32)[0, 0] ^= 1

    flip.__module__ = "torch"  # a hook of the script's would be there again in the repeated step
    for iteration in range(2):
        plain.step(iteration)
        if iteration == 1:
            handles.append(verified.first.weight.register_hook(flip))
        verified.step(iteration)
    (found,) = verified.job.events
    assert isinstance(found, ev.StepDiffered)
    assert "model.3.weight" in found.tensors
    assert verified.digests() == plain.digests()


def told(act: OnCorruption, *ranks: int) -> list[ev.Event]:
    """What follows if workers of a job with two on each of two machines were wrong."""
    verified, scenario = Training(1, act), Scenario()
    for line in ("open 2 workers=2", "join A B"):
        scenario.run_line(line)
    verified.job.state = scenario.state
    faults = {rank: Fault("bucket 0", ("the gradient of 0.weight",)) for rank in ranks}
    verified.verify._tell(StepInfo(5, 1), Verdict(Kind.ONCE, faults, right=True))
    differed, *follows = verified.job.events
    assert isinstance(differed, ev.StepDiffered)
    assert differed.ranks == ranks
    return follows


@pytest.mark.parametrize("ranks", [(2,), (2, 3)])
def test_a_machine_is_at_fault_with_all_its_workers(ranks: tuple[int, ...]) -> None:
    assert told(OnCorruption.WARN, *ranks) == []
    for act in (OnCorruption.DRAIN, OnCorruption.BACK):
        (asked,) = told(act, *ranks)
        assert isinstance(asked, ev.DrainRequested)
        assert asked.machine == "B"
    (closed,) = told(OnCorruption.STOP, *ranks)
    assert isinstance(closed, ev.JobClosed)
    assert "machine 1 has computed iteration 5 wrong: the gradient of 0.weight in bucket 0" in closed.reason


def test_several_machines_stop_a_job_and_none_of_them_leaves() -> None:
    assert told(OnCorruption.DRAIN, 0, 3) == []
    (closed,) = told(OnCorruption.STOP, 0, 3)
    assert isinstance(closed, ev.JobClosed)
    assert "machines 0 and 1 have computed iteration 5 wrong" in closed.reason
    assert "(workers 0 and 3)" in closed.reason


def test_nobody_leaves_for_what_was_changed_between_machines() -> None:
    for act in OnCorruption:
        assert told(act) == []


def test_a_step_that_is_not_deterministic_is_said_to_be_so() -> None:
    verified = Training(2)
    verified.wrong = (1, 2, 3)
    for iteration in range(2):
        verified.step(iteration)
    (found,) = verified.job.events
    assert isinstance(found, ev.StepDiffered)
    assert (found.kind, found.right) == ("not deterministic", False)


def test_an_interrupted_step_is_verified_from_its_beginning() -> None:
    verified = Training(2)
    info = StepInfo(1, 1)
    info.computation = verified.verify.computation(info)
    assert info.computation == 1
    verified.verify.begin(info)
    assert outputs.are_watched()
    verified.verify.interrupted(Interruption())
    assert not outputs.are_watched()
    assert verified.verify.computation(info) == 1


def verified_in(every: int, epochs: Sequence[int]) -> list[int]:
    """The steps of epochs that are verified: the last one of each may not be run again."""
    training, found, iteration = Training(every), list[int](), 0
    verify = training.verify
    for steps in epochs:
        training.epochs.began = iteration
        for number in range(steps):
            step = StepInfo(iteration, 1, repeatable=number + 1 < steps)
            step.computation = verify.computation(step)
            while step.computation:
                verify.begin(step)
                again = verify.judge(step).again
                found += [] if again else [iteration]
                step.computation = verify.computation(step) if again else 0
            iteration += 1
    return found


def test_a_step_that_is_due_at_the_end_of_an_epoch_is_made_up_for() -> None:
    assert verified_in(10, [10, 10, 10]) == [10, 20]
    assert verified_in(10, [5, 5, 10, 10]) == [10, 20]
    assert verified_in(5, [10, 10]) == [4, 10, 14]
    assert verified_in(4, [3, 4, 9]) == [3, 7, 11]
    assert verified_in(100, [50, 50, 50]) == [100]
    assert verified_in(10, [30]) == [9, 19]


def test_it_is_made_up_for_on_all_workers_alike() -> None:
    """One that was ahead when a machine was lost has not run the step before in this process."""
    training = Training(10)
    training.job.state = State(round=RecoveryRound(plan=Plan(RecoveryMode.REPLAY, 18)))
    training.epochs.began = 20
    assert training.verify.computation(StepInfo(20, 2)) == 1
    training.job.state = State(round=RecoveryRound(plan=Plan(RecoveryMode.REPLAY, 20)))
    assert training.verify.computation(StepInfo(20, 2)) == 0


@pytest.mark.parametrize(
    "step",
    [
        StepInfo(2, 1),
        StepInfo(1, 1, replayed=True),
        StepInfo(1, 1, repeatable=False),
        StepInfo(0, 1),
    ],
)
def test_steps_that_are_not_verified(step: StepInfo) -> None:
    """Another one, a replayed one, the last one of an epoch, and the first one of a generation."""
    assert Training(1 if step.iteration == 0 else 2).verify.computation(step) == 0
