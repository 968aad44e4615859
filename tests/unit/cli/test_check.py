"""``swift-run --check``: the table from facts, and the job that is made of a command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli import run
from swift_ft.cli.check import Checked
from swift_ft.launch.settings import MachineJob
from swift_ft.observe.checked import CheckedWorker, CheckFolder, PartFacts

MODEL = PartFacts(name="model", kind="weights", made_of="GPT", nbytes=2_000_000)
ADAM = PartFacts(name="optimizer", kind="optimizer", made_of="AdamW", nbytes=4_000_000, undoable=True)
SCHEDULER = PartFacts(name="scheduler", kind="scheduler", made_of="LinearLR")


def machine(slot: int, protection: str = "replication", **more: Any) -> dict[str, Any]:
    facts = {"machine": slot, "protection": protection, "why": f"reason {slot}"}
    return {**facts, "transfer_s": None, "again_s": None, **more}


def worker(rank: int, *machines: dict[str, Any], **more: Any) -> CheckedWorker:
    """One of two replicas; worker 0 has the forecast."""
    facts: dict[str, Any] = {
        "machine": rank,
        "world_size": 2,
        "iterations": 2,
        "step_s": 0.5,
        "store": "s3://bucket/run",
        "checkpoint_every": 100,
        "snapshot_every": None,
        "parts": (MODEL, ADAM, SCHEDULER),
        "replicas": 2,
        "forecast": {"machines": machines, "script": []} if machines else None,
    }
    return CheckedWorker(rank=rank, **{**facts, **more})


def checked(*machines: dict[str, Any], **more: Any) -> Checked:
    """Two workers with the same facts."""
    first = worker(0, *(machines or (machine(0), machine(1))), **more)
    return Checked([first, worker(1, **more)], sessions=2)


def text_of(one: Checked) -> str:
    return " ".join(str(one).split())


def test_all_is_protected() -> None:
    one = checked()
    assert not one.findings()
    assert not one.advice()
    lines = str(one).splitlines()
    assert lines[0] == "What is protected"
    assert lines[2].split() == ["model", "weights", "GPT", "2.00", "MB", "all", "from", "a", "replica"]
    assert lines[3].endswith("from a replica; a step can be undone")
    assert lines[4].endswith("from a replica; put back when a step is repeated")
    assert "replicas 2 of the model all workers" in text_of(one)
    assert "Not protected" not in str(one)
    assert one.last_lines().splitlines()[-1] == "All is protected."
    assert "the store s3://bucket/run in 2 iterations" in one.last_lines().replace("\n", " ")


@pytest.mark.parametrize(
    ("forecast", "more", "words"),
    [
        (machine(1), {}, "1 replication the iteration in flight reason 1"),
        (machine(1, transfer_s=0.25), {}, "the iteration in flight, and 0.250 s to receive the state"),
        (machine(1, "logging"), {}, "the iteration in flight; the lost part replays 100 iterations reason 1"),
        (machine(1, "logging", again_s=20.0), {}, "replays 100 iterations (40.0 s) reason 1"),
        (machine(1, "memory", again_s=1.0), {"snapshot_every": 4}, "4 iterations of all machines (2.00 s)"),
        (machine(1, "checkpoint", again_s=25.0), {}, "100 iterations of all machines (50.0 s)"),
    ],
)
def test_what_a_loss_costs(forecast: dict[str, Any], more: dict[str, Any], words: str) -> None:
    """At most: a forecast is for a loss in the middle of an interval."""
    assert words in text_of(checked(machine(0), forecast, **more))


def test_parts_that_differ_by_worker_stand_below_each_other() -> None:
    small = dataclasses.replace(MODEL, nbytes=1_000_000)
    first = worker(0, machine(0), machine(1, "logging"), parts=(MODEL, ADAM))
    lines = str(Checked([first, worker(1, parts=(small, ADAM))], sessions=2)).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["model", "model", "optimizer", "optimizer"]
    assert lines[2].endswith("0        from a replica")
    assert lines[3].endswith("1        replayed from the log")


NO_POSITION = {"asks_index": False, "loader_goes_on": True}

UNPROTECTED: dict[str, tuple[Callable[[], Checked], str, str]] = {
    "no session": (lambda: Checked([], sessions=0), "makes no swift_ft.Session", "Put a session around"),
    "no steps": (lambda: Checked([], sessions=2), "ended before all workers", "for step in session.steps"),
    "a worker is missing": (
        lambda: Checked([worker(0, machine(0), machine(1))], sessions=2),
        "ended before all workers",
        "",
    ),
    "the checkpoint": (
        lambda: checked(machine(0), machine(1, "checkpoint")),
        "Up to 100 iterations of all workers, if machine 1 is lost: reason 1.",
        "snapshot_every",
    ),
    "one machine": (lambda: checked(machine(0, "checkpoint")), "machine 0 is lost", "--machines 2"),
    "no position": (
        lambda: checked(**NO_POSITION),
        "The position in the data of workers 0 and 1",
        "LoaderBatches",
    ),
    "too large": (lambda: checked(too_large=("bank.array",)), "bank.array changes in place", "in a module"),
    "a warning": (lambda: checked(said=(("snapshots_off", "no effect"),)), "no effect", ""),
}


@pytest.mark.parametrize("case", UNPROTECTED)
def test_something_is_not_protected(case: str) -> None:
    make, what, remedy = UNPROTECTED[case]
    one = make()
    (finding,) = one.findings()
    assert what in finding.what
    assert remedy in finding.remedy
    assert what in text_of(one)
    assert one.last_lines().splitlines()[-1] == "Not protected: 1 thing."


def test_a_position_may_be_kept_in_the_state() -> None:
    assert not checked(**NO_POSITION, keeps_position=("position",)).findings()
    assert not checked(asks_index=False).findings()  # such as random numbers, which follow from the step


def test_what_the_session_says_is_shown_once_with_its_workers() -> None:
    line = ("parameter_copied", "model.weight changes outside of an optimizer's step")
    first = worker(0, machine(0), machine(1), said=(line,))
    one = Checked([first, worker(1)], sessions=2)
    assert not one.findings()
    assert "model.weight changes outside of an optimizer's step (worker 0)" in text_of(one)


def test_what_may_be_better() -> None:
    plain = dataclasses.replace(ADAM, undoable=False)
    (advice,) = checked(parts=(MODEL, plain)).advice()
    assert "wrap_optimizer(optimizer)" in advice
    (advice,) = checked(loader_goes_on=True).advice()
    assert "An iterator of a DataLoader" in advice


def test_unlike_stores_are_refused() -> None:
    assert not checked().refused
    one = Checked([worker(0, machine(0)), worker(1, store="elsewhere")], sessions=2)
    assert "2 stores, such as elsewhere and s3://bucket/run" in one.refused


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = CheckFolder(str(tmp_path))
    facts = [worker(0, machine(0), said=(("event", "line"),), between=("validate",)), worker(1)]
    for one in reversed(facts):
        folder.note_session(one.rank)
        folder.write(one)
    found = folder.read()
    assert json.dumps(dataclasses.asdict(found[0])) == json.dumps(dataclasses.asdict(facts[0]))
    assert found[1] == facts[1]
    assert folder.sessions == 2
    assert folder.has_session(1)
    assert not folder.has_session(2)


# ------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[MachineJob]:
    """The jobs that swift-run would have run."""
    for name in ("OMP_NUM_THREADS", "RES_OPTIONS"):  # swift-run sets what is not set
        monkeypatch.setenv(name, "1")
    found: list[MachineJob] = []

    def note(job: MachineJob) -> int:
        assert Path(job.settings.check).is_dir()
        found.append(job)
        return 0

    monkeypatch.setattr(run, "_run_cluster", note)
    return found


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ([], (2, 1)),
        (["--machines", "3"], (3, 1)),
        (["--nproc-per-node", "4"], (1, 4)),
        (["--standalone", "--nnodes", "4"], (4, 1)),
        (["--machines", "2", "--spares", "2", "--max-restarts", "3"], (2, 1)),
    ],
)
def test_the_job(
    flags: list[str], shape: tuple[int, int], jobs: list[MachineJob], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--check", *flags, __file__]) == 1  # nobody has said anything
    assert "Nothing is protected" in capsys.readouterr().out
    (job,) = jobs
    assert (job.opened.machines, job.opened.workers_per_machine) == shape
    assert job.opened.restarts == job.settings.config.spares == 0
    assert job.settings.config.no_replacement
    assert job.settings.store == run._EMBEDDED
    assert job.launch_config.logs_specs is not None
    assert str(job.launch_config.logs_specs.root_log_dir).startswith(job.settings.check)
    assert not Path(job.settings.check).exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resume"], "leave out --resume"),
        (["--auto-resume"], "leave out --auto-resume"),
        (["--inject", "kill machine=1 iteration=1"], "leave out --inject"),
        (["--nnodes", "4"], "give --machines N in place of --nnodes 4"),
        (["--no-python"], "leave out --no-python"),
    ],
)
def test_what_cannot_be_checked(
    flags: list[str], words: str, jobs: list[MachineJob], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--check", *flags, __file__]) == 2
    assert not jobs
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
