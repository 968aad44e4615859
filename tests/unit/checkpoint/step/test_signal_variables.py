"""What a signal handler has set in a run is not set in the one that goes on from its checkpoint."""

from __future__ import annotations

import functools
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.program.signal_handlers import set_by_handlers

flag = count = 0


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.stopping, self.seen = False, 0

    def on_signal(self, *_: Any) -> None:
        self.stopping = True

    def __call__(self, *given: Any) -> Any:
        return super().__call__(*given)


def on_signal(*_: Any) -> None:
    global flag
    flag = 1


def sets_attribute(net: Net, *_: Any) -> None:
    net.stopping = bool(count)


class Handler:
    def __init__(self) -> None:
        self.called = self.other = False

    def __call__(self, *_: Any) -> None:
        self.called = True


@pytest.fixture
def install() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR2)

    def install(handler: Any) -> None:
        signal.signal(signal.SIGUSR2, handler)

    yield install
    signal.signal(signal.SIGUSR2, before)


def test_variables_of_a_file(install: Callable[[Any], None]) -> None:
    install(on_signal)
    (found,) = set_by_handlers()
    assert found.sets(globals(), "flag")
    assert not found.sets(globals(), "count")
    assert not found.sets(SimpleNamespace(flag=0), "flag")


def test_attributes(install: Callable[[Any], None]) -> None:
    net, other, handler = Net(), Net(), Handler()
    for one, owner, name in (
        (net.on_signal, net, "stopping"),
        (functools.partial(sets_attribute, net), net, "stopping"),
        (lambda *_: setattr(net, "seen", 1), net, ""),  # not read from the code
        (handler, handler, "called"),
    ):
        install(one)
        (found,) = set_by_handlers()
        assert not found.sets(owner, "seen")
        assert not found.sets(owner, "other")
        assert not found.sets(other, "stopping")
        assert not name or found.sets(owner, name)


def test_variables_of_a_function(install: Callable[[Any], None]) -> None:
    def main() -> CodeType:
        ended = other = 0

        def handler(*_: Any) -> None:
            nonlocal ended
            ended = other

        install(handler)
        return sys._getframe().f_code

    code = main()
    (found,) = set_by_handlers()
    assert found.sets_local(code, "ended")
    assert not found.sets_local(code, "other")
    assert not found.sets_local(on_signal.__code__, "ended")


def test_none(install: Callable[[Any], None]) -> None:
    for handler in (signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler):
        install(handler)
        assert set_by_handlers() == []


def run(
    install: Callable[[Any], None],
    saved: Any = None,
    *,
    resumes: bool = False,
    returns: bool = False,
    asked: bool = False,
) -> Any:
    """A script: it runs its first step, or goes on with a state. Returns its state, and its variables.

    Args:
        install: a signal handler.
        saved: the state to go on with.
        resumes: it is of an earlier run.
        returns: it comes again, as a loss after the first step leads back to it.
        asked: the signal comes in this run, too, and its variables are put back after that.
    """
    net, ended, best = Net(), False, 0.0

    def on_other_signal(*_: Any) -> None:
        nonlocal ended
        ended = net.stopping = True

    state = TrainingState({"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)})
    rollback = Rollback(state)
    install(on_other_signal)
    rollback.watch()
    if saved is None:
        rollback.begin(0)
        best, net.seen = 3.0, 5
        signal.raise_signal(signal.SIGUSR2)
        rollback.completed()
    else:
        state.run = "resumed" if resumes else state.run
        state.take_over(state.to_load({}) | saved)
        if asked:  # a signal of this run, and then variables that this process has noted itself
            rollback.begin(0)
            signal.raise_signal(signal.SIGUSR2)
            rollback.completed()
            own = rollback.carried.to_save()
            ended = net.stopping = False
            rollback.carried.take_over(own)
        if returns:
            rollback.begin(1)
            rollback.completed()
            state.take_over(state.to_load({}) | saved)
    rollback.close()
    return state.to_save(), (ended, net.stopping), (best, net.seen)


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("resumes", [True, False])
def test_only_a_resumed_run_begins_without_them(
    resumes: bool, returns: bool, install: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A replacement in the same run has to end with all others."""
    saved, *set_there = run(install)
    assert set_there == [(True, True), (3.0, 5)]
    with caplog.at_level(logging.INFO):
        _, flags, others = run(install, saved, resumes=resumes, returns=returns)
    assert flags == (not resumes, not resumes)
    assert others == (3.0, 5)
    said = [record.message for record in caplog.records if "signal handler" in record.message]
    assert len(said) == resumes * (1 + returns)
    assert all("model.stopping, which" in one or "model.stopping and" in one for one in said)


def test_what_a_resumed_run_has_noted_is_its_own(install: Callable[[Any], None]) -> None:
    saved, *_ = run(install)
    _, flags, _ = run(install, saved, resumes=True, asked=True)
    assert flags == (True, True)
