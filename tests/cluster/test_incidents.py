"""Whose fault it was: each failure ends in one line and one record, and one that comes again ends the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.incident_words import incident_in_words
from swift_ft.recovery.causes import ADVICE, Cause
from swift_ft.recovery.incidents import Incident
from tests.support.cluster import ClusterRun, run_cluster

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "goes_wrong.py"


def run(folder: Path, how: str, *flags: str) -> tuple[ClusterRun, dict[str, Any]]:
    """The run and its only incident."""
    done = run_cluster(
        folder, machines=2, script=[str(SCRIPT), str(folder / "store"), str(folder), how], flags=[*flags]
    )
    (incident,) = done.report["incidents"]
    return done, incident


def test_each_cause_is_told_in_a_line_and_in_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine dies, connections end, a scheduler stops a launcher, and the runtime itself has a defect."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    script = [str(SCRIPTS / "meets_all.py"), str(tmp_path / "store"), str(tmp_path)]
    done = run_cluster(tmp_path, machines=2, script=script, flags=["--max-restarts", "1"])
    assert done.code == 0, done.output[-3000:]
    told = [(one["cause"], one["way"], one["slots"]) for one in done.report["incidents"]]
    machine, network, scheduler, runtime = done.report["incidents"]
    assert told == [
        (Cause.MACHINE, "replica", [1]),
        (Cause.NETWORK, network["way"], network["slots"]),
        (Cause.SCHEDULER, "replica", [1]),
        (Cause.RUNTIME, "restart", [1]),
    ]
    assert "connection ended" in machine["reason"]
    assert network["slots"], "the worker that has said so"
    assert scheduler["reason"] == "stopped by SIGTERM"
    assert scheduler["evidence"] == ["this launcher runs in Slurm job 4711: see sacct -j 4711"]
    assert runtime["reason"].startswith("worker 1: AttributeError: 'NoneType' object has no attribute")
    place, defect, _ = runtime["evidence"]
    assert re.fullmatch(r"meets_all.py:\d+, in <module>", place)
    assert re.fullmatch(r"in swift_ft, steps.py:\d+", defect)
    assert_told(done)
    assert [lost.count for lost in done.last_state().membership.losses.values()] == [1], "the dead machine's"


def assert_told(done: ClusterRun) -> None:
    """Checks that the line of each incident has what its record has, and says what to do."""
    for record in done.report["incidents"]:
        lists = {name: tuple(value) for name, value in record.items() if isinstance(value, list)}
        incident = Incident(**record | lists)
        line = incident_in_words(incident)
        assert f"] {line}\n" in done.output
        for part in (f"(cause: {incident.cause})", incident.reason, *incident.evidence, incident.advice):
            assert part in line
        assert incident.advice == ADVICE[Cause(incident.cause)]


@pytest.mark.parametrize(
    ("how", "cause", "name"),
    [
        ("segfault", "native code", "SIGSEGV"),
        pytest.param("killed", "signal from outside", "SIGKILL", marks=pytest.mark.thorough),
    ],
)
def test_a_killed_worker_says_how_far_it_was_and_its_last_words(
    tmp_path: Path, how: str, cause: str, name: str
) -> None:
    done, incident = run(tmp_path, how, "--redirects", "3")
    assert done.code == 0, done.output[-3000:]
    assert (tmp_path / "struck").exists()
    assert (incident["cause"], incident["slots"], incident["way"]) == (cause, [1], "replica")
    assert incident["reason"] == f"worker 1 was killed by {name}"
    if how == "segfault":
        assert re.fullmatch(r"at goes_wrong.py:\d+ \(go_wrong\)", incident["evidence"][-2])
    assert incident["evidence"][-1] == "the tape is torn"
    assert f"incident 1 on machine 1 (cause: {cause}): worker 1 was killed by {name} (" in done.output


def test_a_call_that_holds_the_interpreter_is_named(tmp_path: Path) -> None:
    done, incident = run(tmp_path, "holds", "--heartbeat-timeout", "2")
    assert done.code == 0, done.output[-3000:]
    assert (tmp_path / "struck").exists()
    assert (incident["cause"], incident["slots"], incident["way"]) == ("script", [1], "replica")
    assert incident["reason"].startswith("worker 1 was silent for 2 s")
    assert re.fullmatch(r"at goes_wrong.py:\d+ \(go_wrong\)", incident["evidence"][-1])


def test_native_code_that_crashes_in_each_start_ends_the_run(tmp_path: Path) -> None:
    """As a library does that is imported before any session, on all machines alike."""
    script = tmp_path / "crashes.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    done = run_cluster(tmp_path, machines=2, script=[str(script)])
    assert done.code == 1
    assert 2 <= len(done.events("MachineLost")) <= 6, "not as often as --max-failures allows"
    assert "ended 2 times by an error in native code, and no worker had a session yet" in done.output
    assert {incident["cause"] for incident in done.report["incidents"]} == {"native code"}
    assert done.report["incidents"][-1]["way"] == "the run ended"


@pytest.mark.thorough
def test_a_hang_is_located(tmp_path: Path) -> None:
    """One sleeps, and the other one waits for it. Nothing is lost, and nobody is killed."""
    script = [str(SCRIPT), str(tmp_path / "store"), str(tmp_path), "hangs"]
    done = run_cluster(tmp_path, machines=2, script=script)
    assert done.code == 0, done.output[-3000:]
    assert not done.recoveries
    (said,) = [line for line in done.output.splitlines() if " hangs: " in line]
    first, second = said.partition(" hangs: ")[2].split(". ")
    line = r"goes_wrong.py:\d+"
    assert re.match(rf"Worker 1 is at {line} \(go_wrong\): {line} \(go_wrong\) < {line} \(<module>\)", first)
    assert re.fullmatch(rf"Worker 0 is at {line} \(<module>\), in torch.autograd.*: .* < .*", second)


@pytest.mark.thorough
def test_a_hang_that_a_timeout_of_torch_ends_is_located(tmp_path: Path) -> None:
    """One stands in its own code for ever, and the other one's wait for it fails as a connection does."""
    done, incident = run(tmp_path, "stuck", "--report-timeout", "5")
    assert done.code == 0, done.output[-3000:]
    assert (tmp_path / "struck").exists()
    assert len(done.events("CommunicationFailed")) == len(done.events("DeadlinePassed")) == 1
    assert (incident["cause"], incident["slots"]) == ("script", [1])
    (place,) = incident["evidence"]
    assert re.fullmatch(r"worker 1 is at goes_wrong.py:\d+ \(go_wrong\) < goes_wrong.py:\d+ .*", place)


@pytest.mark.parametrize("how", ["late", pytest.param("late after a loss", marks=pytest.mark.thorough)])
def test_a_script_that_is_late_before_its_session_is_no_broken_machine(tmp_path: Path, how: str) -> None:
    done, incident = run(tmp_path, how, "--report-timeout", "6")
    assert done.code == 0, done.output[-3000:]
    assert (tmp_path / "late").exists()
    (passed,) = done.events("DeadlinePassed")
    (place,) = passed["evidence"]
    assert re.fullmatch(r"worker 1 is at goes_wrong.py:\d+ \(begin_late\)", place)
    assert passed["located"] == passed["machines"]
    assert passed["reason"] == "no answer within 6 s (--report-timeout) while agreeing"
    if how == "late":
        assert (incident["cause"], incident["slots"], incident["evidence"]) == ("script", [1], [place])
    else:
        assert passed["reason"] in incident["others"]
    assert not done.last_state().membership.losses


def test_a_pause_for_an_outage_may_be_longer_than_the_wait_for_a_machine(tmp_path: Path) -> None:
    """Ten seconds after the second failure. The only machine for the slot is there, and waits."""
    flags = ("--spares", "0", "--join-timeout", "5", "--elastic-wait", "100")
    done, incident = run(tmp_path, "outage", *flags)
    assert done.code == 0, done.output[-3000:]
    assert (tmp_path / "met again").exists()
    assert len(done.events("ScriptFailed")) == 2
    assert {*incident["slots"]} == {1}
    assert not done.events("JobClosed")


@pytest.mark.parametrize(
    ("how", "cause", "where", "facts"),
    [
        ("bad sample", "data", "__getitem__", ["sample 5 of Labels"]),
        pytest.param("each time", "script", "go_wrong", [], marks=pytest.mark.thorough),
    ],
)
def test_an_error_that_comes_again_ends_the_run_at_once(
    tmp_path: Path, how: str, cause: str, where: str, facts: list[str]
) -> None:
    done = run_cluster(
        tmp_path,
        machines=2,
        script=[str(SCRIPT), str(tmp_path / "store"), str(tmp_path), how],
        flags=["--max-restarts", "9"],
    )
    assert done.code == 1
    first, second = done.report["incidents"]
    assert (first["way"], second["way"], second["times"]) == ("restart", "the run ended", 2)
    for incident in (first, second):
        assert (incident["cause"], incident["slots"]) == (cause, [1])
        place, *others = incident["evidence"]
        assert place.startswith("goes_wrong.py:")
        assert place.endswith(f", in {where}")
        assert others == [*facts, "after 5 iterations"]
    last = done.output.rstrip().splitlines()[-1]
    assert (
        "ValueError: sample 5 has no label (twice, after 5 iterations: another restart would meet it" in last
    )


def test_a_run_whose_machines_all_fail_their_health_checks_says_why(tmp_path: Path) -> None:
    flags = ["--spares", "0", "--health-checks", "disk,tests.support.health:never_good"]  # one would wait
    script = [str(SCRIPT), str(tmp_path / "store"), str(tmp_path), "each time"]
    done = run_cluster(tmp_path, machines=2, script=script, flags=flags)
    assert done.code == 1
    last = done.output.rstrip().splitlines()[-1]
    assert "all machines ended before the job did: machine m-" in last
    assert "never_good: its door is open. Repair it" in last
    assert len(done.events("HealthCheckFailed")) == 2


def test_a_machine_that_fails_its_health_checks_stays_out(tmp_path: Path) -> None:
    """It may not come back after its loss. Without the check it would wait as a spare."""
    flags = ["--health-checks", "disk,product,clock,tests.support.health:good_until_lost"]
    (tmp_path / "waits").touch()
    flags += ["--on-event", f"grep -q health_check_failed && touch {tmp_path / 'said'} || true"]
    done, incident = run(tmp_path, "killed", *flags)
    assert done.code == 0, done.output[-3000:]
    assert (tmp_path / "struck").exists()
    assert (tmp_path / "said").exists()
    assert incident["slots"] == [1]
    lost = incident["machines"][0]
    assert f"machine {lost} stays out, after its loss: " in done.output
    assert "good_until_lost: its third fan stands still. Repair it" in done.output
    (failed,) = done.events("HealthCheckFailed")
    assert failed["machine"] == f"{lost.rpartition('.')[0]}.1"
    assert "its third fan stands still" in failed["reason"]
    joined = [event["machine"] for event in done.events("MachineJoined")]
    assert sorted(joined) == sorted({*joined})
    assert len({event["identity"] for event in done.events("MachineJoined")}) == len(joined)
    assert not any(name.startswith(lost.rpartition(".")[0]) and name != lost for name in joined)


@pytest.mark.thorough
def test_an_error_that_passes_is_forgiven(tmp_path: Path) -> None:
    done, incident = run(tmp_path, "no memory", "--max-restarts", "1")
    assert done.code == 0, done.output[-3000:]
    assert (tmp_path / "struck").exists()
    assert (incident["cause"], incident["way"]) == ("out of memory", "restart")
    assert "let the script use less memory" in done.output
