"""torch's store is killed or frozen under a job: training goes on, and a recovery waits until it is back.

The launcher starts it again, empty, and the machines republish what they hold.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swift_ft.recovery.job_state import Phase, State
from tests.support.cluster import (
    KILLS_OTHERS,
    ClusterRun,
    assert_identical,
    at_once,
    run_cluster,
    training,
)
from tests.support.rendezvous import ENDPOINT, a_recovery_is, once, signal_store
from tests.support.told import ToldJob
from tests.support.waiting import wait_until

LOSS = "kill machine=1 iteration=5 point=forward microbatch=3"
RESTARTED = "the rendezvous store died and is started again"
REPUBLISHED = "this machine has republished the journal"


def run_with(folder: Path, *flags: str, inject: str = "", script: list[str] | None = None) -> ClusterRun:
    return run_cluster(
        folder, inject=inject, flags=["--endpoint-out", str(folder / ENDPOINT), *flags], script=script
    )


def assert_restored(run: ClusterRun, times: int = 1) -> None:
    """The store was started again, and one machine republished the journal: all of it is there in the end."""
    assert run.output.count(RESTARTED) == run.output.count(REPUBLISHED) == times, run.output[-3000:]
    assert run.report["events"][0]["event"] == "JobOpened"
    assert "Traceback" not in run.output
    assert "c10d" not in run.output


def assert_replayed(run: ClusterRun) -> None:
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
    assert not run.events("CommunicationFailed")


@pytest.mark.parametrize("losses", [(), (1,), (0, 2)])
def test_the_store_is_killed(
    losses: tuple[int, ...], tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone: nothing waits. Together with machines: they are repaired once the store is there again."""
    monkeypatch.setenv("KILLS", at_once("store", *losses, by=losses[-1] if losses else 2))
    run = run_with(tmp_path, script=training(tmp_path, KILLS_OTHERS))
    assert_identical(run, references())
    assert_restored(run)
    assert bool(run.recoveries) == bool(losses)
    if losses:
        assert {slot for recovery in run.recoveries for slot in recovery["slots"]} == {*losses}


def test_a_machine_is_lost_later(tmp_path: Path, references: Any) -> None:
    """The store was restored long before: a replacement finds there all that its predecessor had set."""
    kill = partial(signal_store, tmp_path, signal.SIGKILL)
    with once(tmp_path, lambda state: state.checkpoints.committed == 0, kill) as killed:
        run = run_with(tmp_path, inject=LOSS)
    assert killed.is_set()
    assert_identical(run, references())
    assert_restored(run)
    assert_replayed(run)


@pytest.mark.parametrize("phase", [Phase.AGREEING, Phase.RECOVERING])
def test_the_store_is_killed_during_a_recovery(phase: Phase, tmp_path: Path, references: Any) -> None:
    kill = partial(signal_store, tmp_path, signal.SIGKILL)
    with once(tmp_path, a_recovery_is(phase), kill) as killed:
        run = run_with(tmp_path, inject=LOSS)
    assert killed.is_set()
    assert_identical(run, references())
    assert_restored(run)
    assert all(recovery["mode"] == "replay" for recovery in run.recoveries)
    assert {slot for recovery in run.recoveries for slot in recovery["slots"]} == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("recovered", [False, True], ids=["at first", "after a recovery"])
def test_the_store_is_killed_while_the_group_forms(recovered: bool, tmp_path: Path, references: Any) -> None:
    """The group needs the store to form: all meet again, and lose nothing."""
    kill = partial(signal_store, tmp_path, signal.SIGKILL)

    def forms(state: State) -> bool:
        return state.phase == Phase.LIVE and recovered == (state.generation > 1)

    with once(tmp_path, forms, kill) as killed:
        run = run_with(tmp_path, inject=LOSS)
    assert killed.is_set()
    assert_identical(run, references())
    assert_restored(run)
    assert "fallback" not in {recovery["mode"] for recovery in run.recoveries}


@pytest.mark.thorough
def test_the_store_is_killed_again_and_again(tmp_path: Path, references: Any) -> None:
    """While a loss is agreed on, and while the lost worker replays."""
    kill = partial(signal_store, tmp_path, signal.SIGKILL)
    with contextlib.ExitStack() as stack:
        killed = [
            stack.enter_context(once(tmp_path, a_recovery_is(phase), kill))
            for phase in (Phase.AGREEING, Phase.RECOVERING)
        ]
        run = run_with(tmp_path, inject=LOSS)
    assert all(done.is_set() for done in killed)
    assert_identical(run, references())
    assert run.output.count(RESTARTED) == len(killed)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., ToldJob]]:
    jobs: list[ToldJob] = []

    def start(*flags: str, inject: str = "") -> ToldJob:
        flags = ("--endpoint-out", str(tmp_path / ENDPOINT), *flags)
        jobs.append(ToldJob(tmp_path, machines=2, flags=flags, inject=inject, iterations=10, quick=6))
        return jobs[-1]

    yield start
    for started in jobs:
        with contextlib.suppress(AssertionError, ProcessLookupError):
            signal_store(tmp_path, signal.SIGCONT)
        started.stop()


@pytest.fixture(scope="module")
def of_two(references: Any) -> ClusterRun:
    found: ClusterRun = references("--iterations", "10", machines=2)
    return found


def test_a_frozen_store_does_not_end_training(
    tmp_path: Path, of_two: ClusterRun, job: Callable[..., ToldJob]
) -> None:
    """SIGSTOP, for longer than a recovery would wait."""
    run = job("--rendezvous-timeout", "2")
    run.wait_for("iteration 1: loss")
    signal_store(tmp_path, signal.SIGSTOP)
    run.wait_for("A recovery waits for it for 2 s (--rendezvous-timeout)")
    silent = re.compile(r"has not answered for ([3-9]|[1-9][0-9]) s; training goes on")
    wait_until(lambda: silent.search(run.output.read_text()) is not None, "a silence beyond the timeout")
    signal_store(tmp_path, signal.SIGCONT)
    run.wait_for("answers again")
    ended = run.end()
    assert_identical(ended, of_two)
    assert not ended.recoveries


def test_a_recovery_waits_for_a_frozen_store(
    tmp_path: Path, of_two: ClusterRun, job: Callable[..., ToldJob]
) -> None:
    run = job("--rendezvous-timeout", "100", inject="kill machine=1 iteration=5 point=forward microbatch=3")
    run.wait_for("iteration 1: loss")
    signal_store(tmp_path, signal.SIGSTOP)
    run.wait_for("iteration 4: loss")
    run.wait_for("A recovery waits for it for 100 s")
    assert not run.has_said("machine 1 is lost")  # nobody could write it down
    signal_store(tmp_path, signal.SIGCONT)
    ended = run.end()
    assert_identical(ended, of_two)
    assert_replayed(ended)


def test_a_recovery_does_not_wait_for_ever(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is frozen, and a machine with it: after the timeout the run ends and says how to go on.

    Not while a spare still connects to it: torch prints an error of its own if the greeting is not answered.
    """
    monkeypatch.setenv("KILLS", at_once("store", 1, by=2, by_signal=signal.SIGSTOP, spare=True))
    run = run_with(
        tmp_path, "--rendezvous-timeout", "4", script=training(tmp_path, KILLS_OTHERS, iterations=1000)
    )
    assert run.code == 1
    assert "--resume" in run.output.splitlines()[-1]
    assert "Traceback" not in run.output
    assert "c10d" not in run.output
    assert_identical(run_cluster(tmp_path, flags=["--resume"]), references())
