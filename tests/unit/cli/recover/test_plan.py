"""``swift-recover plan``: what it shows of each outcome, and what bad input gets."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from swift_ft.checkpoint.worker_files import PROFILE, WorkerFiles, of_rank
from swift_ft.cli.recover.main import main
from swift_ft.costs.job import Measured, Worker
from swift_ft.recovery.events import Event, JobClosed, JobOpened, ScriptExited, StatusReported
from tests.support.journals import RUN, checkpoint, machine, opening, store_with


def saved(machines: int, *, spares: int = 1, helpers: int = 1, replicas: bool = False) -> list[Event]:
    events = opening(machines, spares=spares, helpers=helpers, replicas=replicas)
    return [*events, *checkpoint(machines, 0), *checkpoint(machines, 10)]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def shown(capsys: pytest.CaptureFixture[str], folder: Path, arguments: str, code: int = 0) -> str:
    assert main(["plan", str(folder), *arguments.split()]) == code
    return capsys.readouterr().out


def test_a_replay_with_helpers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {1: ["g00001-s000000-i00000010-00000014.arrow"]}
    store_with(str(tmp_path), saved(4, helpers=3), machines=4, segments=names)
    out = shown(capsys, tmp_path, "--fail 2")
    assert "machine 2 dies in iteration 14" in out
    assert f"the spare {machine(4)} takes the place of machine 2" in out
    assert "the run recovers by replay" in out
    assert "replaying 4 iterations: 2.00 s (measured: the times of its checkpoints" in out
    assert (
        "replacing the machine, and leaving the old groups: ? (unknown: this run has had no recovery" in out
    )
    assert "all in all at least 2.00 s, until all are back in iteration 14" in out
    assert "loads the checkpoint of iteration 10, replays 4 iterations from logs" in out
    assert out.count("helps worker 2") == 2
    assert out.count("keeps its state and waits") == 1


def test_two_machines_of_which_one_has_no_spare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_with(str(tmp_path), saved(4), machines=4)
    plan = json.loads(shown(capsys, tmp_path, "--fail 1,3 --iteration 12 --json"))
    assert (plan["failed"], plan["iteration"], plan["outcome"]) == ([1, 3], 12, "recovers")
    assert (plan["spares"], plan["joining"]) == ({"1": machine(4)}, [3])
    out = shown(capsys, tmp_path, "--fail 1,3 --iteration 12")
    assert "no spare waits to take the place of machine 3" in out


def test_no_machine_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are left run the lost slots, too."""
    store_with(str(tmp_path), saved(4), machines=4)
    plan = json.loads(shown(capsys, tmp_path, "--fail 1,3 --no-spare --json"))
    assert (plan["outcome"], plan["joining"], plan["hosts"]) == ("recovers", [1, 3], {"1": 0, "3": 2})
    out = shown(capsys, tmp_path, "--fail 1,3 --no-spare")
    assert "if none joins within --elastic-wait, machine 2 runs its workers, too" in out


def test_copies_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = []
    for event in saved(3):
        if isinstance(event, StatusReported):
            event = replace(event, stages=(), holds=())
        events.append(event)
    store = store_with(str(tmp_path), events, machines=3)
    measured = Measured(iteration_s=2.0, state_bytes=600, link_bytes_per_s=200.0, snapshot_every=4)
    files = WorkerFiles(store, RUN)
    for rank in range(3):
        files.write(of_rank(rank, PROFILE), asdict(Worker((), measured=measured)))
    out = shown(capsys, tmp_path, "--fail 1 --iteration 14")
    assert "newest memory checkpoint: iteration 12" in out
    assert "the run recovers by memory: no other worker has the state of worker 1" in out
    assert "gets its copy of iteration 12 from worker 2, trains 2 iterations again" in out
    assert out.count("loads its own copy of iteration 12, trains 2 iterations again") == 2
    assert "getting the lost state from the memory of another machine: 3.00 s" in out
    out = shown(capsys, tmp_path, "--fail 1,2 --iteration 14")
    assert "the run recovers by fallback" in out
    assert out.count("loads the checkpoint of iteration 10, trains 4 iterations again") == 3


def test_a_replica(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_with(str(tmp_path), saved(2, replicas=True), machines=2)
    assert "receives its state from worker 1" in shown(capsys, tmp_path, "--fail 0")


def test_outcomes_that_somebody_should_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = saved(4)
    assert isinstance(first, JobOpened)
    store_with(str(tmp_path / "a"), [replace(first, min_machines=4), *others], machines=4)
    assert "the run stands still" in shown(capsys, tmp_path / "a", "--fail 1 --no-spare", code=1)
    assert "the run ends: 4 machines were lost" in shown(capsys, tmp_path / "a", "--fail 0,1,2,3", code=1)
    store_with(str(tmp_path / "b"), opening(4, spares=1), machines=4)
    assert "all processes start again" in shown(capsys, tmp_path / "b", "--fail 1", code=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--fail 9", "there is no machine 9"),
        ("--fail one", "give numbers of machines"),
        ("--fail 1 --iteration x", "not the number of an iteration"),
        ("--fail 1 --iteration 999999999999", "has not come to iteration 999999999999: the newest"),
        ("--fail 1 --iteration 21", "that its store knows of is 10"),
        ("", "--fail"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    store_with(str(tmp_path), saved(4), machines=4)
    assert main(["plan", str(tmp_path), *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_run_whose_journal_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_with(str(tmp_path), [], machines=4)
    assert main(["plan", str(tmp_path), "--fail", "1"]) == 2
    assert "no moment in which all workers trained" in capsys.readouterr().err


@pytest.mark.parametrize("ok", [True, False])
def test_a_run_that_has_ended_has_no_machine_to_lose(
    ok: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As status says; what would have been is shown for the time before."""
    exits = [ScriptExited(machine=machine(slot), started_in=1, iteration=10) for slot in range(2)]
    end = exits if ok else [JobClosed(reason="stopped by SIGTERM", exit_code=143)]
    store_with(str(tmp_path), [*saved(2), *end], machines=2)
    how = "well (finished)" if ok else "with an error (stopped by SIGTERM)"
    assert main(["status", str(tmp_path)]) == 0
    assert f"ended {how}" in capsys.readouterr().out
    first, second, *_ = shown(capsys, tmp_path, "--fail 1").splitlines()
    assert first == f"the run has ended {how}: it has no machine left to lose. Before its end:"
    assert "machine 1 dies in iteration 10" in second
    plan = json.loads(shown(capsys, tmp_path, "--fail 1 --json"))
    assert plan["ended"]["ok"] == ok
    assert main(["plan", str(tmp_path), "--fail", "1", "--iteration", "11"]) == 2
    assert "has not come to iteration 11" in capsys.readouterr().err


def test_a_run_that_goes_on_may_be_ahead_of_its_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_with(str(tmp_path), saved(2), machines=2)
    out = shown(capsys, tmp_path, "--fail 1 --iteration 20")
    assert out.startswith("run ")
    assert "dies in iteration 20" in out
    assert json.loads(shown(capsys, tmp_path, "--fail 1 --json"))["ended"] is None
