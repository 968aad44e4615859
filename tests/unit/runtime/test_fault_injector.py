"""A fault strikes once, at its point, and not while the worker replays."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swift_ft.errors import UsageError
from swift_ft.faults import failpoints, parse_faults, strikes
from swift_ft.faults.failpoints import Point, hit
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.protocol import step, step_all
from swift_ft.runtime.fault_injector import InjectedError, inject_faults
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.storage.store import Store
from tests.support.journals import machine, opening
from tests.support.waiting import wait_until


class Worker:
    """Rank 2 on machine 1, and as much of its job as an injector meets."""

    def __init__(
        self,
        inject: str,
        injected: frozenset[str] = frozenset(),
        store: Path | None = None,
        of: Store | None = None,
        agent_pid: int = 0,
    ) -> None:
        self.state = SimpleNamespace(injected=injected)
        self.journal: list[ev.Event] = []
        self.replaying = False
        self.broken = 0
        self.status = WorkerStatus(5)
        self.optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
        self.active = SimpleNamespace(number=1)
        self.participant = SimpleNamespace(state=self.state, append=self.journal.append, active=self.active)
        place = SimpleNamespace(rank=2, slot=1, agent_pid=agent_pid, config=SimpleNamespace(inject=inject))
        inject_faults(
            cast(Any, place),
            self.status,
            [self.optimizer],
            participant=cast(Any, self.participant),
            break_connections=self.break_connections,
            replaying=lambda: self.replaying,
            store=of if of is not None or store is None else Store(store),
        )

    def break_connections(self) -> None:
        self.broken += 1


@pytest.fixture(autouse=True)
def no_listener() -> Iterator[None]:
    yield
    failpoints.listen(None)


def test_nothing_listens_by_default() -> None:
    hit(Point.FORWARD, 5, 3)


def test_a_fault_strikes_once_at_its_point() -> None:
    worker = Worker("break worker=2 iteration=5 point=forward microbatch=3")
    for iteration, microbatch in ((4, 3), (5, 2), (5, 3), (5, 3)):
        hit(Point.FORWARD, iteration, microbatch)
        hit(Point.BACKWARD, iteration, microbatch)
    assert worker.broken == 1
    assert worker.journal == [ev.FaultInjected(fault="break worker=2 iteration=5 point=forward microbatch=3")]


@pytest.mark.parametrize("fault", ["break worker=1 iteration=5", "break machine=2 iteration=5"])
def test_faults_of_others_are_left_to_them(fault: str) -> None:
    worker = Worker(fault)
    hit(Point.BETWEEN, 5)
    assert not worker.broken


def test_a_fault_that_happened_before_a_restart_does_not_happen_again() -> None:
    fault = "break machine=1 iteration=5 point=between"
    worker = Worker(fault, frozenset([fault]))
    hit(Point.BETWEEN, 5)
    assert not worker.broken


@pytest.mark.parametrize("point", ["start", "leave", "report", "load", "join"])
def test_there_is_nothing_to_break_without_a_group(point: str) -> None:
    """It is not in the journal: the run says that it never struck."""
    worker = Worker(f"break worker=2 iteration=any point={point}")
    worker.active.number = None
    hit(Point(point), 5)
    assert (worker.broken, worker.journal) == (0, [])


def test_a_replay_passes_the_points_of_the_original_unharmed() -> None:
    worker = Worker("break worker=2 iteration=5 point=reduced; break worker=2 iteration=5 point=replay")
    worker.replaying = True
    hit(Point.REDUCED, 5, 0)
    before = worker.broken
    hit(Point.REPLAY, 5)
    assert (before, worker.broken) == (0, 1)
    worker.replaying = False
    hit(Point.REDUCED, 5, 0)
    assert worker.broken == 2


def test_the_end_of_an_optimizers_step_is_a_point() -> None:
    worker = Worker("raise worker=2 iteration=5 point=optimizer")
    with pytest.raises(InjectedError, match="point=optimizer"):
        worker.optimizer.step()


@pytest.mark.parametrize(("newest", "phase"), [(3, Phase.LIVE), (6, Phase.LIVE), (None, Phase.AGREEING)])
def test_a_fault_waits_for_a_checkpoint(newest: int | None, phase: Phase) -> None:
    """Or until another loss interrupts what it would interrupt."""
    worker = Worker("break worker=2 iteration=5 point=forward committed=3")
    asked: list[Callable[[Any], bool]] = []

    def wait_for(condition: Callable[[Any], bool], timeout_s: float) -> object:
        assert not worker.journal
        asked.append(condition)
        return worker.state

    worker.participant.wait_for = wait_for
    hit(Point.FORWARD, 5, 0)
    (condition,) = asked
    assert condition(SimpleNamespace(checkpoints=SimpleNamespace(committed=newest), phase=phase))
    for before in (None, 2):
        of = SimpleNamespace(committed=before)
        assert not condition(SimpleNamespace(checkpoints=of, phase=Phase.LIVE))
    assert worker.broken == 1


@pytest.mark.parametrize(
    ("action", "machines", "reload"), [("reload", (0, 1, 2), True), ("move", (0, 3, 2), False)]
)
def test_a_planned_change_is_asked_for_and_waited_for(
    action: str, machines: tuple[int, ...], reload: bool
) -> None:
    worker = Worker(f"{action} machine=1 iteration=5")
    state = trains(3, spares=1)
    worker.participant.state = state
    looks: list[bool] = []

    def wait_for(condition: Callable[[State], bool], timeout_s: float) -> State:
        """Of the next world two workers of three are prepared, then the last one."""
        after = step(state, worker.journal[-1])
        for rank in range(3):
            looks.append(condition(after))
            after = step(after, ev.NextPrepared(rank=rank, world=1))
        looks.append(condition(after))
        assert condition(step(after, ev.MachineLost(machine=machine(0), reason="power")))
        return after

    worker.participant.wait_for = wait_for
    hit(Point.BETWEEN, 5)
    injected, planned = worker.journal
    assert injected == ev.FaultInjected(fault=f"{action} machine=1 iteration=5 point=between")
    assert isinstance(planned, ev.ChangePlanned)
    assert planned.machines == tuple(map(machine, machines))
    assert (planned.world, planned.reload) == (1, reload)
    assert looks == [False, False, False, True]


def test_no_change_is_asked_for_where_none_can_be() -> None:
    worker = Worker("reload machine=1 iteration=5; move machine=1 iteration=6")
    state = trains(3, spares=1)
    worker.participant.state = step(state, ev.MachineLost(machine=machine(0), reason="power"))
    hit(Point.BETWEEN, 5)
    change = ev.ChangePlanned(world=1, machines=tuple(map(machine, range(3))))
    worker.participant.state = step(state, change)
    hit(Point.BETWEEN, 6)
    assert worker.journal == []  # they count as faults that never struck


def trains(machines: int, spares: int) -> State:
    """A job whose workers train."""
    state = step_all(State(), opening(machines, spares=spares))
    ready = (ev.WorkerReady(rank=rank, generation=state.generation) for rank in range(machines))
    return step_all(state, ready)


def test_a_process_that_is_stopped_says_at_what_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the entry in the journal is there, which takes its time."""
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
    fault = "stop worker=2 iteration=5 point=forward"
    worker = Worker(fault)
    entered: list[float] = []
    worker.participant.append = lambda event: entered.append(time.time())
    hit(Point.FORWARD, 5, 0)
    said = re.search(r"strikes at Unix time (\d+\.\d+): (.*)", caplog.text)
    assert said is not None
    assert said[2] == fault
    assert entered[0] - 1e-5 <= float(said[1]) <= time.time()
    assert signals == [signal.SIGSTOP]


AGENT = """
import subprocess, sys
sleeps = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
print(*(one.pid for one in sleeps), flush=True)
sys.stdin.read()
for one in sleeps:
    one.kill()
    one.wait()
"""


@pytest.mark.parametrize("target", ["machine", "worker", "agent"])
def test_a_machine_that_is_stopped_is_stopped_as_a_whole(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent, all other workers, and then this one; each alone where the fault says so."""
    signals: list[tuple[int, int]] = []
    with subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        others = [int(pid) for pid in agent.stdout.readline().split()]
        monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
        Worker(f"stop {target}={2 if target == 'worker' else 1} iteration=5", agent_pid=agent.pid)
        hit(Point.BETWEEN, 5)
        monkeypatch.undo()
    stopped = {"machine": [agent.pid, *others, os.getpid()], "worker": [os.getpid()], "agent": [agent.pid]}
    assert len(others) == 2
    assert signals == [(pid, signal.SIGSTOP) for pid in stopped[target]]


def test_a_process_that_ends_meanwhile_leaves_none_stopped_for_ever() -> None:
    """A machine is suspended, one of whose processes has ended since it was listed."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen(["sleep", "600"]) as agent, subprocess.Popen(["sleep", "600"]) as other:
        code = (
            "from swift_ft.faults import strikes\n"
            f"strikes.below = lambda pid: [{ended.pid}, {other.pid}]\n"
            f"strikes.suspend({agent.pid}, 0.5)\n"
        )
        try:
            worker = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
            wait_until(lambda: has_gone_on(agent.pid), "the agent goes on")
            wait_until(lambda: has_gone_on(other.pid), "its other process goes on")
        finally:
            agent.kill()
            other.kill()
    assert worker.returncode == 0


def has_gone_on(pid: int) -> bool:
    """Whether a child was stopped, and goes on since."""
    found, status = os.waitpid(pid, os.WCONTINUED | os.WNOHANG)
    return found == pid and os.WIFCONTINUED(status)


def test_a_fault_strikes_also_without_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker("break worker=2 iteration=5 point=forward committed=3")
    worker.participant.wait_for = lambda condition, timeout_s: None
    hit(Point.FORWARD, 5, 0)
    assert worker.broken == 1
    assert "no checkpoint of iteration 3 is committed" in caplog.text


@pytest.mark.parametrize(
    ("fault", "expected"), [("flip worker=2 iteration=5", b"abbd"), ("truncate worker=2 iteration=5", b"ab")]
)
def test_the_newest_file_of_the_store_is_damaged(
    fault: str, expected: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(fault, store=tmp_path)
    new = written(tmp_path, "log/rank-00002/g00001-s000002", at=2)
    others = [
        written(tmp_path, "log/rank-00002/g00001-s000001", at=1),
        *(written(tmp_path, name, at=3) for name in ("metrics.csv", "checkpoints/best.pt", "log/train.txt")),
    ]
    hit(Point.BETWEEN, 5)
    assert new.read_bytes() == expected
    assert f"'{fault} point=between' has struck log/rank-00002/g00001-s000002" in caplog.text
    assert {other.read_bytes() for other in others} == {b"abcd"}
    assert worker.journal


def written(store: Path, name: str, at: int) -> Path:
    """A file of four bytes, and when it was written."""
    file = store / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"abcd")
    os.utime(file, (at, at))
    return file


@pytest.mark.parametrize("action", ["flip", "truncate"])
def test_a_draft_is_not_damaged(action: str, tmp_path: Path) -> None:
    """Of its reserved room nothing may be left, and the rest is not written yet."""
    store = Store(tmp_path)
    with store.open_write("log/rank-00002/g00001-s000001") as finished:
        finished.write(b"abcd")
    draft = store.open_write("log/rank-00002/g00001-s000002")
    draft.reserve(4)
    store.write_json("metrics.json", {"loss": 1})  # of the script
    worker = Worker(f"{action} worker=2 iteration=5", of=store)
    hit(Point.BETWEEN, 5)
    assert worker.journal
    assert (tmp_path / "log/rank-00002/g00001-s000001").read_bytes() in (b"abbd", b"ab")
    draft.write(b"abcd")
    draft.commit()
    assert (tmp_path / "log/rank-00002/g00001-s000002").read_bytes() == b"abcd"


@pytest.mark.parametrize("action", ["flip", "truncate"])
def test_a_file_that_goes_meanwhile_is_no_error_of_the_script(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is struck."""
    old = written(tmp_path, "checkpoints/00000002/file", at=1)
    new = written(tmp_path, "checkpoints/00000004/file", at=2)
    harm = getattr(strikes, action)

    def harm_late(file: Path) -> None:
        new.unlink(missing_ok=True)
        harm(file)

    monkeypatch.setattr(strikes, action, harm_late)
    Worker(f"{action} worker=2 iteration=5", store=tmp_path)
    hit(Point.BETWEEN, 5)
    assert not new.exists()
    assert old.read_bytes() != b"abcd"


@pytest.mark.parametrize("action", ["flip", "truncate", "vanish"])
def test_a_store_that_goes_meanwhile_is_no_error_of_the_script(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run says that nothing was struck."""
    store, harm = tmp_path / "store", getattr(strikes, action)
    written(store, "run.json", at=1)

    def harm_late(path: Path, *options: float) -> None:
        shutil.rmtree(store)
        harm(path, *options)

    monkeypatch.setattr(strikes, action, harm_late)
    fault = f"{action} worker=2 iteration=5 point=between"
    worker = Worker(fault, store=store)
    hit(Point.BETWEEN, 5)
    assert worker.journal == [ev.FaultInjected(fault=fault)]
    assert f"'{fault}' found nothing to strike" in caplog.text


def test_what_is_not_there_cannot_be_struck(tmp_path: Path) -> None:
    """It is not in the journal: the run says that it never struck."""
    worker = Worker("flip worker=2 iteration=5; vanish worker=2 iteration=5", store=tmp_path / "nothing")
    hit(Point.BETWEEN, 5)
    assert not worker.journal


def test_a_store_is_gone_for_a_while(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    Worker("vanish worker=2 iteration=5 seconds=0.2", store=store)
    hit(Point.BETWEEN, 5)
    assert not store.exists()
    wait_until(store.exists, "the store is back")


def test_a_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))  # and is put back afterwards
    Worker("clock worker=2 iteration=5 seconds=-86400")
    hit(Point.BETWEEN, 5)
    assert time.time() < before() - 80_000
    assert time.time_ns() < (before() - 80_000) * 1e9


def test_no_line_of_python_runs_while_the_interpreter_is_held() -> None:
    beats, over = list[float](), threading.Event()

    def beat() -> None:
        while not over.wait(0.001):
            beats.append(time.monotonic())

    other = threading.Thread(target=beat)
    other.start()
    wait_until(lambda: beats, "the first beat")
    Worker("freeze worker=2 iteration=5 seconds=0.5")
    hit(Point.BETWEEN, 5)
    count = len(beats)
    wait_until(lambda: len(beats) > count, "another beat")
    over.set()
    other.join()
    assert max(after - before for before, after in itertools.pairwise(beats)) > 0.4


def test_a_slow_worker_sleeps_for_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    computed = iter([1.0, 3.0, 3.5])
    monkeypatch.setattr(time, "process_time", lambda: next(computed))
    monkeypatch.setattr(time, "sleep", slept.append)
    Worker("slow worker=2 iteration=5 factor=3")
    for _ in range(3):
        hit(Point.BETWEEN, 5)
    assert slept == [4.0, 1.0]


def test_a_store_fails_for_all_workers_that_hear_of_it(tmp_path: Path) -> None:
    """Not the first one to come to the point reads in the journal that the fault has struck."""
    fault = "denied machine=all iteration=5 point=forward calls=1 seconds=9"
    store = Store(tmp_path, patience_s=0.0)
    worker = Worker(fault, store=tmp_path, of=store)
    hit(Point.BETWEEN, 4)
    store.write_json("a.json", {})
    worker.state.injected = frozenset([fault])
    hit(Point.BETWEEN, 4)
    with pytest.raises(PermissionError, match="injected"):
        store.write_json("b.json", {})
    hit(Point.FORWARD, 5, 0)
    store.write_json("b.json", {})
    assert not worker.journal


def test_a_store_that_failed_before_this_process_works_for_it(tmp_path: Path) -> None:
    fault = "denied machine=all iteration=5 point=forward seconds=9"
    store = Store(tmp_path, patience_s=0.0)
    Worker(fault, frozenset([fault]), store=tmp_path, of=store)
    hit(Point.BETWEEN, 4)
    store.write_json("a.json", {})


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("freeze machine=1 iteration=5", "freeze needs a worker="),
        ("suspend worker=1 iteration=5", "suspend needs a machine="),
        ("kill worker=1 iteration=5 seconds=3", "kill has no seconds="),
        ("freeze worker=1 iteration=5 seconds=0", "not above 0"),
        ("slow worker=1 iteration=5 factor=1", "above 1"),
        ("full agent=1 iteration=5", "full needs a machine= or a worker="),
        ("kill machine=all iteration=5", "kill is for one machine, not for all"),
        ("full worker=1 iteration=5 calls=0", "calls=0 is for faults of the store, and above 0"),
        ("busy worker=1 iteration=5 each=1", "is for lag"),
        ("unplug worker=1 iteration=5", "unplug needs a machine="),
        ("flap machine=1 iteration=5 peer=0", "peer=0 is for deaf, mute, unplug"),
        ("unplug machine=1 iteration=5 mbit=5", "is for throttle"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(fault: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_faults(fault)
