"""The loop over epochs and their steps: what is yielded, and what belongs to an epoch's last step."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.program import last_duties
from swift_ft.program.system_exit import SessionExit
from swift_ft.runtime import records, steps
from swift_ft.runtime.epoch_top import Epochs
from swift_ft.runtime.hooks.between import Stop
from swift_ft.runtime.records import Records
from swift_ft.runtime.script.script_phases import ScriptPhase, ScriptPhases
from swift_ft.runtime.steps import Loop, Step
from swift_ft.torch_adapters.step_failures import step_failures


@pytest.fixture(autouse=True)
def begun() -> Iterator[None]:
    step_failures.begin()
    yield
    step_failures.begin()


class Runner:
    """Stands for all that is around a step: it notes what happens, and takes completed steps back."""

    def __init__(self, epochs: Epochs, undone: tuple[int, ...] = ()) -> None:
        self.iteration, self.replaying = 0, False
        self.happened: list[str] = []
        self.batches = SimpleNamespace(end=lambda: None, index_read=lambda: None)
        self.finish_on_device = lambda: None
        self._epochs = epochs
        self._undone = [*undone]
        self._before: dict[int, dict[str, Any]] = {}

    def is_connection_error(self, error: BaseException) -> bool:
        return isinstance(error, ConnectionError)

    def ready_to_step(self) -> None:
        """Another worker was lost in the step that this one has completed: it takes the step back."""
        if self._undone and self.iteration == self._undone[0] + 1:
            self.iteration = self._undone.pop(0)
            self._epochs.load_state_dict(self._before[self.iteration])

    def settle(self) -> bool:
        return True

    def stops_for_layout(self) -> bool:
        return False

    def begin(self, *, repeatable: bool = True) -> None:
        step_failures.begin()
        self._before[self.iteration] = self._epochs.state_dict()

    def complete(self) -> None:
        self.happened.append(f"complete {self.iteration}")
        self.iteration += 1

    def interrupted(self, cause: str, failure: object, *, caught: bool) -> None:
        self.happened.append(f"interrupted {self.iteration}")

    def finish(self) -> bool:
        self.happened.append("finish")
        return True

    def leave(self) -> None:
        self.happened.append("leave")


class Top:
    """Stands for what is around the lines at the top of an epoch."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs
        self.lines: list[int] = []

    def begins(self, iteration: int) -> None:
        self.lines.append(iteration)

    def over(self) -> None:
        pass

    def settle(self, iteration: int) -> str:
        return ""

    def last_step_begins(self, iteration: int) -> None:
        pass

    def step_begins(self) -> None:
        pass


class Script:
    """A script's loop, with what it meets."""

    def __init__(self, *undone: int, recorded: int = 0, offline: bool = False) -> None:
        epochs = Epochs()
        context: Any = SimpleNamespace(rank=1, recorded=recorded, offline=offline or None)
        self.runner = Runner(epochs, undone)
        self.top = Top(epochs)
        self.stop = Stop("this run")
        between: Any = SimpleNamespace(stop=self.stop)
        runner: Any = self.runner
        top: Any = self.top
        self.phases = ScriptPhases()
        self.loop = Loop(runner, between, self.phases, top, Records(context))

    def say(self, what: str) -> None:
        self.runner.happened.append(what)

    def run(self, epochs: int, steps: int, *, interrupted_in: int | None = None) -> list[str]:
        broken = interrupted_in
        for epoch in self.loop.epochs(epochs):
            self.say(f"epoch {epoch}")
            for step in self.loop.steps_of_epoch(steps):
                with step:
                    if step.index == broken:
                        broken = None
                        raise ConnectionError("reset by peer")
            over = self.stop.at is not None and self.runner.iteration >= self.stop.at
            assert self.phases.phase == (ScriptPhase.OVER if over else ScriptPhase.OUTSIDE)
            self.say(f"end of {epoch}")
        return self.runner.happened


def test_the_lines_after_the_steps_come_before_the_last_one_is_complete() -> None:
    assert Script().run(2, 2) == [
        "epoch 0", "complete 0", "end of 0", "complete 1",
        "epoch 1", "complete 2", "end of 1", "complete 3", "finish",
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("interrupted_in", [0, 2, 3, 5])
def test_an_interrupted_step_is_yielded_again_in_its_epoch(steps: int, interrupted_in: int) -> None:
    happened = Script().run(6 // steps, steps, interrupted_in=interrupted_in)
    assert happened.count(f"interrupted {interrupted_in}") == 1
    assert [line for line in happened if line.startswith("complete")] == [f"complete {i}" for i in range(6)]
    assert [line for line in happened if line.startswith("epoch")] == [
        f"epoch {e}" for e in range(6 // steps)
    ]


def test_an_epoch_whose_last_step_is_taken_back_is_yielded_again() -> None:
    script = Script(1)
    assert script.run(2, 2)[:7] == [
        "epoch 0", "complete 0", "end of 0", "complete 1", "epoch 0", "end of 0", "complete 1",
    ]  # fmt: skip
    assert script.top.lines == [0, 1, 2]


def test_so_is_one_of_a_single_step_whose_lines_are_at_its_beginning() -> None:
    script = Script(0)
    script.run(2, 1)
    assert script.top.lines == [0, 0, 1]


def test_a_break_would_leave_an_epoch_without_its_end() -> None:
    script = Script()
    epochs = script.loop.epochs(2)
    next(epochs)
    for step in script.loop.steps_of_epoch(3):
        with step:
            pass
        break
    with pytest.raises(UsageError, match="takes all steps"):
        next(epochs)


def test_a_break_in_the_last_step_changes_nothing() -> None:
    script = Script()
    for _ in script.loop.epochs(2):
        for step in script.loop.steps_of_epoch(3):
            with step:
                pass
            if step.index_in_epoch == 2:
                break
    assert script.runner.happened[-2:] == ["complete 5", "finish"]


@pytest.mark.parametrize(
    ("end", "leaves"), [("break", True), ("an error of the script", True), ("all", False), ("ours", False)]
)
def test_who_leaves_a_loop_has_something_to_do_at_the_end_of_the_script(
    end: str, leaves: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was begun for the store is still done. Not where the session itself has ended the script."""
    monkeypatch.setattr(last_duties, "_duties", [])
    script = Script()
    if end == "ours":
        monkeypatch.setattr(script.runner, "complete", ends_the_script)
    with contextlib.suppress(KeyError, SystemExit):
        for step in script.loop.steps(3):
            with step:
                pass
            if step.index == 1 and end == "break":
                break
            if step.index == 1 and end == "an error of the script":
                raise KeyError
    assert "leave" not in script.runner.happened
    last_duties.do_all()
    assert (script.runner.happened[-1:] == ["leave"]) == leaves
    assert ("in iteration 1, which does not count" in caplog.text) == leaves
    last_duties.do_all()
    assert script.runner.happened.count("leave") == leaves


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_end_by_the_session_in_an_epoch_leaves_nothing(
    at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a check ends, in the middle of an epoch and between two: the script did not leave its loop."""
    monkeypatch.setattr(last_duties, "_duties", [])
    script = Script()
    taken = script.runner.settle
    monkeypatch.setattr(
        script.runner, "settle", lambda: ends_the_script() if script.runner.iteration == at else taken()
    )
    with pytest.raises(SystemExit):
        script.run(2, 3)
    last_duties.do_all()
    assert "which does not count" not in caplog.text
    assert "leave" not in script.runner.happened


@pytest.mark.parametrize("epochs", [False, True])
def test_an_end_by_the_script_between_two_steps_leaves_the_loop(
    epochs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a function of ``session.between()``: what was begun for the store is still done."""
    monkeypatch.setattr(last_duties, "_duties", [])
    script = Script()
    taken = script.runner.settle
    monkeypatch.setattr(
        script.runner, "settle", lambda: sys.exit(0) if script.runner.iteration == 2 else taken()
    )
    with contextlib.suppress(SystemExit):
        if epochs:
            script.run(2, 3)
        for step in script.loop.steps(3):
            with step:
                pass
    assert script.runner.iteration == 2
    last_duties.do_all()
    assert script.runner.happened[-1] == "leave"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is said to the agent when the process starts again. Here it goes on."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(last_duties, "_duties", [])
    channel = SimpleNamespace(send=lambda **message: found.append(message))
    monkeypatch.setattr(steps, "agent_channel", lambda: channel)
    monkeypatch.setattr(os, "_exit", lambda code: found.append({"code": code}))
    return found


def left(loop: Iterator[Step], at: int, *, interrupted: bool, exits: bool) -> None:
    """A script that leaves its loop within a step, since what it has computed is not a number, say."""
    for step in loop:
        with step:
            if step.index == at:
                if interrupted:
                    step_failures.broken("closed by peer")
                if exits:
                    sys.exit(0)
                break


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize("epochs", [False, True])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("interrupted", [False, True])
def test_no_script_leaves_its_loop_by_what_an_interrupted_step_has_given_it(
    interrupted: bool, held: bool, epochs: bool, exits: bool, sent: list[dict[str, Any]]
) -> None:
    """What comes after its loop would be done as if it had trained to the end."""
    script = Script()
    if epochs:
        outer = script.loop.epochs(2)
        next(outer)
    loop = script.loop.steps_of_epoch(3) if epochs else script.loop.steps(3)
    with contextlib.suppress(SystemExit):
        left(loop, 1, interrupted=interrupted, exits=exits)
    if not held:
        del loop
        assert bool(sent) == interrupted, "before the line behind the loop"
    last_duties.do_all()
    if not interrupted:
        assert sent == []
        assert script.runner.happened[-1] == "leave"
        return
    message, end = sent[:2]
    assert message["starts_again"]
    assert "left its loop in a step that was interrupted (closed by peer)" in message["lost"]
    assert end == {"code": 1}


def test_the_agent_knows_what_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the failure until it is put back. What fails behind the loop is the script's own affair."""
    said: list[str] = []
    monkeypatch.setattr(
        steps, "tell_agent", lambda **message: said.extend([message.get("interrupted", "the loop")])
    )
    script, failed = Script(), False
    for step in script.loop.steps(3):
        with step:
            if step.index == 1 and not failed:
                failed = True
                step_failures.broken("closed by peer")
                step_failures.broken("and another one")
                assert said == ["the loop", "closed by peer"]
    assert said == ["the loop", "closed by peer", "", "the loop"]
    step_failures.broken("closed by peer")
    assert said[4:] == []


def ends_the_script() -> None:
    raise SessionExit(0)


def test_an_epoch_without_a_loop() -> None:
    script = Script()
    with pytest.raises(UsageError, match="takes all steps"):
        for _ in script.loop.epochs(2):
            pass


def test_two_loops_in_an_epoch() -> None:
    script = Script()
    next(script.loop.epochs(2))
    for step in script.loop.steps_of_epoch(1):
        with step:
            pass
    with pytest.raises(UsageError, match="once in each epoch"):
        next(script.loop.steps_of_epoch(1))


def test_epochs_may_have_unlike_numbers_of_steps() -> None:
    script, found = Script(), []
    for epoch in script.loop.epochs(3):
        for step in script.loop.steps_of_epoch(epoch + 1):
            with step:
                found.append((epoch, step.index, step.index_in_epoch))
    assert found == [(0, 0, 0), (1, 1, 0), (1, 2, 1), (2, 3, 0), (2, 4, 1), (2, 5, 2)]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_stop_ends_the_epoch_that_it_is_in(at: int) -> None:
    script = Script()
    script.stop.at = at
    happened = script.run(4, 2)
    assert happened.count("finish") == 1
    assert [line for line in happened if line.startswith("complete")] == [f"complete {i}" for i in range(at)]


def test_an_end_that_an_earlier_run_has_taken_a_step_for_is_one_more() -> None:
    script = Script()
    script.stop.load_state_dict({"at": 2, "run": "the one before", "extra": 0})
    steps = script.loop.steps(4)
    for count, step in enumerate(steps):
        with step:
            script.stop.extra += count == 2
    assert script.runner.happened == [*(f"complete {number}" for number in range(5)), "finish"]


def test_records_are_given_once() -> None:
    script, given = Script(1), list[int]()
    broken = True
    for _ in script.loop.epochs(2):
        for step in script.loop.steps_of_epoch(2):
            with step:
                step.once(given.append, step.index)
                if step.index == 2 and broken:
                    broken = False
                    raise ConnectionError("reset by peer")
    assert given == [0, 1, 2, 3]


@pytest.mark.parametrize("recorded", [0, 1, 3])
def test_a_replacement_gives_what_is_not_known_to_be_given(recorded: int) -> None:
    """Also in a replay: the worker that was lost may have died before its step ended."""
    script, given = Script(recorded=recorded), list[int]()
    for step in script.loop.steps(4):
        with step:
            step.once(given.append, step.index)
        script.runner.replaying = step.index < 2
    assert given == [*range(recorded, 4)]


def test_a_return_to_a_checkpoint_gives_no_record_again() -> None:
    script, given, back = Script(), list[int](), True
    for step in script.loop.steps(5):
        with step:
            step.once(given.append, step.index)
            if step.index == 3 and back:
                back, script.runner.iteration = False, 1
                raise ConnectionError("reset by peer")
    assert given == [0, 1, 2, 3, 4]


def test_a_replay_without_its_job_gives_none() -> None:
    script, given = Script(offline=True), list[int]()
    script.runner.replaying = True
    for step in script.loop.steps(2):
        with step:
            step.once(given.append, step.index)
        script.runner.replaying = step.index < 1
    assert given == []


def test_the_agent_knows_which_records_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that have some, and after they are given: one is rather given twice than not at all."""
    said: list[Any] = []
    monkeypatch.setattr(
        records, "agent_channel", lambda: SimpleNamespace(mention=lambda **message: said.append(message))
    )
    for step in Script().loop.steps(4):
        with step:
            if step.index % 2:
                step.once(said.append, step.index)
    assert said == [
        1, {"recorded": {"rank": 1, "before": 2}}, 3, {"recorded": {"rank": 1, "before": 4}},
    ]  # fmt: skip
