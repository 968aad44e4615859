"""The command line: ``python -m swift_ft.testing.simulation``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from swift_ft.recovery.handlers import membership, recovery
from swift_ft.recovery.job_state import State
from swift_ft.testing.scenario import Scenario, ScenarioError
from swift_ft.testing.simulation import JobKind, simulate
from swift_ft.testing.simulation.__main__ import main
from swift_ft.testing.simulation.job import SimulatedJob
from swift_ft.testing.simulation.seeds import make_job
from swift_ft.testing.simulation.store import Violation


@pytest.mark.parametrize("kind", JobKind)
def test_many_seeds_are_summed_up(kind: JobKind, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--job", kind, "--shape", "4x1", "--seeds", "20", "--first-seed", "5", "--json"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert (summary["job"], summary["shape"], summary["first_seed"], summary["seeds"]) == (kind, "4x1", 5, 20)
    assert summary["seen"]["finished"] + summary["seen"].get("gave up", 0) == 20
    assert summary["violations"] == {}
    assert err.splitlines()[-1] == "100 % of the seeds"


def test_processes_share_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    def summary(*jobs: str) -> dict[str, object]:
        assert main(["--seeds", "25", "--json", *jobs]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        del found["cpu_s"]
        return found

    assert summary("--jobs", "2") == summary()


def test_the_summary_is_a_table_of_what_was_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "60"]) == 0
    out = capsys.readouterr().out
    assert "kill_machine" in out
    assert "mode: replay" in out
    assert "0 violations" in out


def test_one_seed_is_shown_with_its_journal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "7"]) == 0
    shown = capsys.readouterr().out
    assert "JobOpened(" in shown
    assert "--> live generation 1" in shown
    assert main(["--seed", "7", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    outcome = simulate(JobKind.PIPELINE, 7, 4)
    assert (result["events"], result["ticks"], result["seen"]) == (
        outcome.events,
        outcome.ticks,
        outcome.seen,
    )
    assert result["journal"] == shown.splitlines()[:-1]


def test_a_violation_fails_and_names_the_command_that_shows_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(state: State, reason: str) -> State:
        return state

    for handlers in (membership, recovery):
        monkeypatch.setattr(handlers, "restart_all", forgetful)
    assert main(["--seeds", "60"]) == 1
    out = capsys.readouterr().out
    command = next(line for line in out.splitlines() if line.startswith("to see it: "))
    words = shlex.split(command.removeprefix("to see it: "))
    assert words[:3] == ["python", "-m", "swift_ft.testing.simulation"]
    assert main(words[3:]) == 1
    assert command in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--shape", "4"], ["--shape", "1x1"], ["--seeds", "0"], ["--job", "no-such-job"]]
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert f"argument {arguments[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", JobKind)
def test_a_seed_becomes_a_scenario(kind: JobKind, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The protocol's state is the same after it, with every kind of event that such a job has."""
    for seed in range(5):
        file = tmp_path / f"{seed}.txt"
        assert main(["--job", kind, "--seed", str(seed), "--scenario", str(file)]) == 0
        assert file.read_text().splitlines()[0] == f"# {capsys.readouterr().out.splitlines()[-1]}"
        job = make_job(kind, seed, 4)
        job.run()
        scenario = Scenario()
        scenario.run(file)
        assert scenario.state == job.states[-1]


def test_an_order_that_fails_becomes_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the event that must never be; expectations are added by hand."""

    def fails(self: SimulatedJob) -> None:
        raise Violation("states differ\nin two lines")

    monkeypatch.setattr(SimulatedJob, "run", fails)
    file = tmp_path / "found.txt"
    assert main(["--seed", "7", "--scenario", str(file)]) == 1
    first, second, *_ = file.read_text().splitlines()
    assert (first, second) == ("# seed 7: states differ", "# in two lines")
    file.write_text(file.read_text() + "expect generation 7\n")
    with pytest.raises(ScenarioError, match="found 1, expected 7"):
        Scenario().run(file)
