"""Commands that change a running job to another world: a real rendezvous store, no machines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from swift_ft.cli.recover.change import phase_of
from swift_ft.cli.recover.main import main
from swift_ft.cli.recover.reshape import machines_in
from swift_ft.config import store_keys
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.runs import find_run
from swift_ft.coordination.store_client import connect
from swift_ft.errors import RendezvousLostError, UsageError
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.protocol import step, step_all
from tests.support.journals import machine, opening, read_now
from tests.support.store_processes import StoreProcess, store_process

MACHINES, SPARES = 3, 2
STOP = 47


@pytest.fixture
def service() -> Iterator[StoreProcess]:
    with store_process() as made:
        client = connect(made.address, find_run(partial(connect, made.address), "run"))
        client.set(store_keys.job_secret(), "the token that the launchers have agreed on")
        yield made


class Job:
    """A job of three machines and two spares, with one worker each.

    Args:
        service: its rendezvous store.
        act: what somebody in it does after each change of the state, by events.
    """

    def __init__(self, service: StoreProcess, act: Callable[[State], list[ev.Event]] | None = None) -> None:
        client = partial(connect, service.address)
        self.at = ["--timeout", "30", "--rdzv-endpoint", str(service.address)]
        self._act = act
        self.follower = Follower(
            open_journal(partial(client, find_run(client, "run")), by="test"), on_change=self._changed
        )
        self._wake, self._begun = threading.Event(), threading.Event()
        self.follower.start()
        threading.Thread(target=self._work, daemon=True).start()
        assert self._begun.wait(60)
        assert self.follower.state.phase == Phase.LIVE

    def _changed(self, before: State, after: State) -> None:
        self._wake.set()

    def _work(self) -> None:
        # A command ends all connections that were opened while it ran: this thread opens its own before.
        for event in opening(MACHINES, spares=SPARES):
            self.follower.append(event)
        self._begun.set()
        done = set[ev.Event]()
        while self._act is not None:
            self._wake.wait()
            self._wake.clear()
            with contextlib.suppress(RendezvousLostError):  # at the end of the test
                for event in self._act(self.follower.state):
                    if event not in done:
                        done.add(event)
                        self.follower.append(event)

    def planned(self) -> list[ev.ChangePlanned]:
        """What was asked for."""
        return [event for event in self._events() if isinstance(event, ev.ChangePlanned)]

    def given_up(self) -> list[ev.ChangeGivenUp]:
        """What was given up."""
        return [event for event in self._events() if isinstance(event, ev.ChangeGivenUp)]

    def _events(self) -> list[ev.Event]:
        return [entry.event for entry in read_now(self.follower._journal)]


def prepare(state: State) -> list[ev.Event]:
    """All workers of the next world are prepared."""
    change = state.worlds.change
    if change is None:
        return []
    workers = range(len(change.world.machines))
    return [ev.NextPrepared(rank=rank, world=change.world.number) for rank in workers]


def obey(state: State) -> list[ev.Event]:
    """Agents and workers do as they should."""
    change, pending, generation = state.worlds.change, state.layouts.pending, state.generation
    if change is None:
        if state.phase == Phase.AGREEING:
            return [
                ev.StatusReported(
                    rank=rank,
                    generation=generation,
                    iteration=STOP,
                    live=True,
                    stages=(rank,),
                    holds=(f"stage {rank}",),
                    group=rank,
                )
                for rank in range(state.world_size)
            ]
        if state.phase == Phase.RECOVERING:
            return [ev.WorkerReady(rank=rank, generation=generation) for rank in range(state.world_size)]
        return [
            ev.MachineLost(machine=spare, reason="it was drained", on_request=True)
            for spare in state.membership.spares
            if spare in state.membership.draining
        ]
    world = change.world.number
    if pending is None:
        switch = ev.SwitchRequested(rank=0, generation=generation, iteration=STOP, world=world)
        ready = len(change.prepared) == len(change.world.machines)
        return [switch] if ready else prepare(state)
    if len(change.offered) < state.world_size:
        return [
            ev.StateOffered(rank=rank, generation=generation, iteration=STOP, address="a:1", digest="d")
            for rank in range(state.world_size)
        ]
    return [ev.StateTaken(rank=rank, world=world) for rank in range(len(change.world.machines))]


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(machine(number) for number in numbers)


def test_a_spare_takes_over(service: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(service, obey)
    assert main(["move", "1", *job.at]) == 0
    (change,) = job.planned()
    assert (change.world, change.machines, change.command, change.plan) == (1, names(0, 3, 2), (), "")
    assert change.reason == "m-1.0 moves to m-3.0"
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "world 1: planned, on 3 machines: m-0.0, m-3.0, m-2.0"
    assert last.startswith(f"world 1: switched at iteration {STOP}")
    assert machine(1) in job.follower.state.membership.spares
    assert main(["move", machine(0), "--to", "host-4", "--json", *job.at]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["world"], facts["machines"], facts["switched"]) == (2, [*names(4, 3, 2)], True)
    assert (facts["reason"], facts["iteration"], facts["interrupted"]) == ("", STOP, False)
    assert facts["seconds"] > 0


def test_the_phases_in_words() -> None:
    """As a command would see them that sees every event."""
    state = step_all(State(), opening(MACHINES, spares=SPARES))
    change = ev.ChangePlanned(world=1, machines=names(0, 3, 2))
    state, told = step(state, change), list[str]()
    while state.phase != Phase.LIVE or state.worlds.change is not None:
        for event in obey(state):
            state = step(state, event)
            told.append(phase_of(state, change))
    assert [*dict.fromkeys(told)] == [
        *(f"prepared {count} of 3 workers" for count in (1, 2, 3)),
        f"stops at iteration {STOP}",
        f"stopped at iteration {STOP}",
        "all have their state: it takes over",
        "",
    ]


@pytest.mark.parametrize(("count", "machines", "left"), [("2", (0, 1), [2]), ("5", (0, 1, 2, 3, 4), [])])
def test_another_number_of_machines(
    service: StoreProcess,
    count: str,
    machines: tuple[int, ...],
    left: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job(service, obey)
    assert main(["scale", count, "--json", *job.at]) == 0
    (change,) = job.planned()
    assert change.machines == names(*machines)
    facts = json.loads(capsys.readouterr().out)
    assert facts["left"] == [*names(*left)]
    assert {*job.follower.state.membership.fenced} == {*names(*left)}
    assert main(["scale", count, *job.at]) == 0
    assert f"the job trains on {count} machines already" in capsys.readouterr().out
    assert len(job.planned()) == 1


def test_another_layout(service: StoreProcess, tmp_path: Path) -> None:
    job = Job(service, obey)
    assert main(["reshape", "--plan", "dp=2,pp=2", *job.at]) == 0
    assert main(["reshape", "--plan", "tp=2,pp=2", *job.at, "--", "train.py", "--lr", "0.1"]) == 0
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"cut": [[0, 3], [4, 7]]}, indent=2))
    assert main(["reshape", "--plan", str(file), *job.at]) == 0
    file.write_text(json.dumps({"machines": 3}))
    assert main(["reshape", "--plan", str(file), *job.at]) == 0
    assert [(change.machines, change.command, change.plan) for change in job.planned()] == [
        (names(0, 1, 2, 3), (), "dp=2,pp=2"),
        (names(0, 1, 2, 3), ("train.py", "--lr", "0.1"), "tp=2,pp=2"),
        (names(0, 1, 2, 3), (), '{"cut":[[0,3],[4,7]]}'),
        (names(0, 1, 2), (), '{"machines":3}'),
    ]
    present = job.follower.state.worlds.present
    assert present.command == ("train.py", "--lr", "0.1")


@pytest.mark.parametrize(
    ("plan", "machines"),
    [
        ({"workers": 4}, 2),
        ({"pipelines": [{"stages": [[0, 4], [5, 9]]}, {"stages": [[0, 3], [4, 5], [6, 7], [8, 9]]}]}, 3),
        ({"pipelines": [{"stages": [[0, 4], [5, 9], [10, 11], [12, 13]]}], "stages_per_worker": 2}, 1),
        ({"cut": [4, 4]}, None),
    ],
)
def test_the_machines_of_a_plan(plan: dict[str, object], machines: int | None) -> None:
    assert machines_in(json.dumps(plan), 2) == machines


def test_a_plan_for_half_a_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="the plan is for 3 workers, and each machine of the job has 2"):
        machines_in("dp=3", 2)


def test_another_script(service: StoreProcess) -> None:
    job = Job(service, obey)
    assert main(["reload", *job.at]) == 0
    assert main(["reload", *job.at, "--", "train.py", "--lr", "0.1"]) == 0
    assert [(change.machines, change.command) for change in job.planned()] == [
        (names(0, 1, 2), ()),
        (names(0, 1, 2), ("train.py", "--lr", "0.1")),
    ]


def test_a_change_that_fails_says_why(service: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(state: State) -> list[ev.Event]:
        if state.worlds.change is None:
            return []
        return [ev.ChangeGivenUp(world=1, reason="worker 2 of the next world has ended with exit code 1")]

    job = Job(service, fail)
    assert main(["reload", *job.at, "--", "other.py"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "swift-recover: world 1 was given up: worker 2 of the next world has ended with exit code 1"
    )


def test_a_lost_machine_is_the_reason(service: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    def lose(state: State) -> list[ev.Event]:
        lost = ev.MachineLost(machine=machine(3), reason="power")
        return [] if state.worlds.change is None else [lost]

    job = Job(service, lose)
    assert main(["move", "1", "--json", *job.at]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["switched"], facts["reason"]) == (False, "machine m-3.0 was lost")
    assert (facts["iteration"], facts["pause_s"]) == (None, None)


def test_a_run_that_ends_is_the_reason(service: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    def end(state: State) -> list[ev.Event]:
        return (
            [] if state.worlds.change is None else [ev.JobClosed(reason="stopped by SIGINT", exit_code=130)]
        )

    assert main(["reload", *Job(service, end).at]) == 1
    assert "world 1 was given up: the run has ended: stopped by SIGINT" in capsys.readouterr().err


def test_what_takes_too_long_is_given_up(service: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(service, prepare)
    assert main(["move", "1", *job.at, "--timeout", "0.5"]) == 1
    assert "world 1 was given up: it had not happened within 0.5 s" in capsys.readouterr().err
    (given_up,) = job.given_up()
    assert given_up.world == 1
    assert job.follower.wait_for(lambda state: state.worlds.change is None, 10) is not None


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C is heard also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_gives_it_up(service: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(state: State) -> list[ev.Event]:
        if state.worlds.change is not None and len(state.worlds.change.prepared) == MACHINES:
            os.kill(os.getpid(), signal.SIGINT)
            return []
        return prepare(state)

    job = Job(service, interrupt)
    assert main(["move", "1", *job.at]) == 130
    (given_up,) = job.given_up()
    assert given_up.reason.endswith(" gave it up (Ctrl-C)")
    assert f"world 1 was given up: {given_up.reason}" in capsys.readouterr().err


def test_dry_run_asks_for_nothing(service: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(service, obey)
    assert main(["move", "2", "--dry-run", *job.at]) == 0
    assert capsys.readouterr().out.startswith("ChangePlanned(world=1, machines=('m-0.0', 'm-1.0', 'm-3.0')")
    assert main(["scale", "4", "--dry-run", "--json", *job.at]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["event"], facts["machines"]) == ("ChangePlanned", [*names(0, 1, 2, 3)])
    assert job.planned() == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["move", "9"], "there is no machine 9"),
        (["move", "1", "--to", "2"], "m-2.0 is no spare that could take a slot"),
        (["move", "m-4.0"], "m-4.0 has no slot to move"),
        (["scale", "6"], "the job has 5 machines, 2 of them as spares: start 1 more"),
        (["scale", "0"], "the job needs at least 1 machines, not 0"),
        (["scale", "2", "--same-workers", "--dry-run"], "omit one"),
        (["reshape", "--plan", "dp=6"], "the job has 5 machines"),
        (["reshape", "--plan", "dp=two"], "dp=two"),
        (["reshape", "--plan", "nowhere.json"], "is neither degrees (dp=2,tp=2) nor a file"),
    ],
)
def test_what_cannot_be_is_one_line(
    service: StoreProcess, command: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(service)
    assert main([*command, *job.at]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert job.planned() == []


@pytest.mark.parametrize(
    "content", ["no JSON", "[1]", '{"machines": "three"}', '{"workers": 0}', '{"pipelines": 3}']
)
def test_a_plan_that_is_none(
    service: StoreProcess, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    assert main(["reshape", "--plan", str(file), *Job(service).at]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the plan" in line


def test_one_change_at_a_time(service: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(service)
    job.follower.append(ev.ChangePlanned(world=1, machines=names(0, 1, 3)))
    for command in (["move", "1"], ["scale", "2"], ["reshape", "--plan", "dp=3"], ["reload"]):
        assert main([*command, *job.at]) == 2
        assert "a change to world 1 is under way" in capsys.readouterr().err
