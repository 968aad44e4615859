"""What an agent reports of workers that ended or are silent."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from immutables import Map

from swift_ft.config import detection_timings as timings
from swift_ft.config.exit_codes import EXIT_FENCED
from swift_ft.launch.detection import worker_watch
from swift_ft.launch.detection.kernel import OomKills
from swift_ft.launch.detection.kernel_log import KernelLog
from swift_ft.launch.detection.worker_channels import WorkerChannels
from swift_ft.launch.detection.worker_watch import WorkerWatch
from swift_ft.launch.processes.context import StandbyContext
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.job_state import JobShape, State
from swift_ft.recovery.membership import Membership
from tests.support.kernel_messages import DISK, LINK, MEMORY, OOM, XID, Kernel, said

RANKS = {0: 4, 1: 5}
NOTHING = KernelLog(Path("/none"))
SILENCE_S = 4.0
AFTERMATH = "NVRM: Xid (PCI:0000:19:00): 45, pid='<unknown>', Preemptive Removal"


class Watched:
    """Two workers of machine A, ranks 4 and 5, without processes."""

    def __init__(self, *, sessions: bool = True, kernel_log: KernelLog = NOTHING) -> None:
        self.reports: list[ev.Event] = []
        self.heard = WorkerChannels(selectors.DefaultSelector())
        self.heard.sessions = {*RANKS} if sessions else set()
        membership: Any = SimpleNamespace(
            machine="A",
            started_in=3,
            journal=SimpleNamespace(append=self.reports.append, post=self.reports.append),
            follower=SimpleNamespace(state=SimpleNamespace(patience=1, machine_patience=1)),
        )
        self.watch = WorkerWatch(
            membership, self.heard, kernel_log, heartbeat_timeout_s=SILENCE_S, machine_silence_s=SILENCE_S / 2
        )
        self.killed: list[int] = []

    def end(self, code: int, pid: int = 0) -> list[ev.Event]:
        """Worker 4 ends; what is reported of it."""
        self.watch.ended(0, RANKS[0], code, pid=pid)
        return self.reports

    def silent_for(self, seconds: float) -> None:
        """Both workers were heard of so long ago, and heartbeats were looked at just now."""
        self.heard.silent(SILENCE_S)
        for local_rank in RANKS:
            self.heard.heartbeats.hear(local_rank, time.monotonic() - seconds)

    def check(self, pids: dict[int, int] | None = None) -> list[int]:
        """The workers that were killed so far. Without pids, no process has their numbers."""
        pids = pids or dict.fromkeys(RANKS, 0)
        processes = SimpleNamespace(pids=lambda: pids, running=lambda: pids, kill=self.killed.append)
        self.watch.check(cast(StandbyContext, processes), RANKS, lambda: None)
        return self.killed


def test_a_worker_that_found_itself_replaced_is_not_reported() -> None:
    assert Watched().end(EXIT_FENCED) == []


def test_a_script_may_end_with_any_code() -> None:
    assert Watched(sessions=False).end(EXIT_FENCED) == [
        ev.ScriptFailed(
            machine="A",
            started_in=3,
            reason=f"worker 4: exited with code {EXIT_FENCED}",
            exit_code=EXIT_FENCED,
        )
    ]
    own_code = Watched()
    own_code.heard.failed[0] = {"failed": "the script exited", "exit_code": EXIT_FENCED}
    assert own_code.end(EXIT_FENCED) == [
        ev.ScriptFailed(
            machine="A", started_in=3, reason="worker 4: the script exited", exit_code=EXIT_FENCED
        )
    ]


def test_how_workers_end() -> None:
    for number, cause in ((9, Cause.SIGNAL), (11, Cause.NATIVE)):
        reason = f"worker 4 was killed by {signal.Signals(number).name}"
        assert Watched().end(-number) == [ev.MachineLost(machine="A", reason=reason, cause=cause)]
    assert Watched().end(1) == [
        ev.ScriptFailed(machine="A", started_in=3, reason="worker 4: exited with code 1")
    ]
    assert Watched().end(0) == [ev.ScriptExited(machine="A", started_in=3, rank=4)]
    recording = Watched()
    recording.heard._note(1, {"recorded": {"rank": 5, "before": 7}})
    recording.watch._membership.follower.state = replace(  # type: ignore[misc]
        State(shape=JobShape(machines=3, workers_per_machine=2)), membership=Membership(slots=Map({"A": 2}))
    )
    (lost,) = recording.end(-9)
    assert isinstance(lost, ev.MachineLost)
    assert lost.recorded == (0, 7), "what comes in its place does not give these records again"
    trained, iterations = Watched(), 12
    trained.heard.beats[0] = {"iteration": iterations}
    assert trained.end(0) == [ev.ScriptExited(machine="A", started_in=3, rank=4, iteration=iterations)]


def test_no_code_says_that_an_interrupted_script_has_trained_to_its_end() -> None:
    interrupted = Watched()
    interrupted.heard._note(0, {"interrupted": "Connection closed by peer"})
    (lost,) = interrupted.end(0)
    assert isinstance(lost, ev.MachineLost)
    assert lost.starts_again
    assert "exit code 0 where it was interrupted (Connection closed by peer)" in lost.reason
    for message in ({"interrupted": ""}, {"in_loop": False, "interrupted": ""}):  # it was put back
        back = Watched()
        back.heard._note(0, {"interrupted": "Connection closed by peer"})
        back.heard._note(0, message)
        assert back.end(0) == [ev.ScriptExited(machine="A", started_in=3, rank=4)]
    failed = Watched()
    failed.heard._note(0, {"interrupted": "Connection closed by peer"})
    assert [type(event) for event in failed.end(3)] == [ev.ScriptFailed]


@pytest.mark.parametrize(
    ("code", "how", "cause"),
    [
        (-40, "was killed by signal 40", Cause.SIGNAL),
        (-62, "was killed by signal 62", Cause.SIGNAL),
        (137, "exited with code 137, as after SIGKILL", Cause.SIGNAL),
        (139, "exited with code 139, as after SIGSEGV", Cause.NATIVE),
    ],
)
def test_a_program_whose_command_was_killed(code: int, how: str, cause: Cause) -> None:
    """A shell tells of that in its exit code, and Python has no names for all signals."""
    watched = Watched(sessions=False)
    assert watched.end(code) == [ev.MachineLost(machine="A", reason=f"worker 4 {how}", cause=cause)]
    starved: Any = Watched(sessions=False)
    starved.watch.oom_kills = SimpleNamespace(why=lambda killed: "the kernel was out of memory")
    (lost,) = starved.end(code)
    assert (lost.reason, lost.cause) == (f"worker 4 {how}: the kernel was out of memory", Cause.MEMORY)


@pytest.mark.parametrize("cause", [Cause.NATIVE, Cause.SIGNAL])
def test_a_killed_process_of_the_script_s(cause: Cause) -> None:
    watched = Watched()
    watched.heard._note(0, {"lost": "a process of a data loader was killed", "cause": cause.value})
    reason = "worker 4: a process of a data loader was killed"
    assert watched.end(1) == [ev.MachineLost(machine="A", reason=reason, cause=cause)]


@pytest.mark.parametrize(
    ("code", "pid", "cause"),
    [
        (-signal.SIGKILL, 4711, Cause.MEMORY),
        (-signal.SIGKILL, 471, Cause.SIGNAL),  # a person's, say: the kernel has named another process
        (-signal.SIGSEGV, 4711, Cause.NATIVE),
        (128 + signal.SIGKILL, 471, Cause.MEMORY),  # the shell's number, and not its command's
        (128 + signal.SIGSEGV, 471, Cause.NATIVE),
    ],
)
def test_a_host_s_count_may_be_of_other_jobs(code: int, pid: int, cause: Cause, tmp_path: Path) -> None:
    """Where no control group has a count: two such losses without progress end the job."""
    kernel = Kernel(tmp_path / "kmsg")
    watched = Watched(sessions=False, kernel_log=kernel.log)
    (tmp_path / "vmstat").write_text("oom_kill 0\n")
    watched.watch.oom_kills = OomKills(tmp_path, tmp_path / "none")
    (tmp_path / "vmstat").write_text("oom_kill 1\n")
    kernel.say(OOM)
    (lost,) = watched.end(code, pid)
    assert isinstance(lost, ev.MachineLost)
    assert lost.cause == cause
    assert ("out of memory" in lost.reason) == (cause == Cause.MEMORY)
    kernel.log.close()


def test_a_loss_says_for_how_long_the_workers_ran() -> None:
    watched = Watched()
    watched.heard.open({})
    watched.heard.since = time.monotonic() - 7200.5
    watched.end(-signal.SIGSEGV)
    watched.heard.close()  # what comes then is of no workers
    watched.watch.report_loss("its setup has changed")
    first, second = (event for event in watched.reports if isinstance(event, ev.MachineLost))
    assert (first.ran_s, second.ran_s) == (7200, 0)


def test_a_worker_that_starts_again_on_purpose(tmp_path: Path) -> None:
    """Nothing has killed it, whatever was killed just now."""
    kernel = Kernel(tmp_path / "kmsg")
    watched: Any = Watched(kernel_log=kernel.log)
    watched.watch.oom_kills = SimpleNamespace(why=lambda killed: "the kernel was out of memory")
    kernel.say(XID)
    watched.heard._note(0, {"lost": "its process starts again", "starts_again": True})
    reason = "worker 4: its process starts again"
    assert watched.end(1) == [ev.MachineLost(machine="A", reason=reason, starts_again=True)]


def test_a_script_that_says_why_it_ends_may_end_with_such_a_code() -> None:
    own = Watched()
    own.heard.failed[0] = {"failed": "the script exited with code 137", "exit_code": 137}
    assert [type(event) for event in own.end(137)] == [ev.ScriptFailed]
    assert [type(event) for event in Watched().end(255)] == [ev.ScriptFailed]


def test_the_last_words_of_a_worker_are_evidence(tmp_path: Path) -> None:
    said = tmp_path / "stderr.log"
    said.write_text("one\ntwo\n\nFatal: no room for the tape\n  at the drive  \n")
    dead = Watched()
    dead.heard.beats[0] = {"iteration": 12}
    dead.watch.ended(0, RANKS[0], -11, str(said))
    (lost,) = dead.reports
    assert isinstance(lost, ev.MachineLost)
    assert lost.evidence == (
        "heard last after 12 iterations",
        "two",
        "Fatal: no room for the tape",
        "at the drive",
    )
    # What a script has raised comes with its own place: the lines would say it once more.
    raised = Watched()
    raised.heard.failed[0] = {"failed": "ValueError: no", "cause": "script", "at": ["train.py:7, in step"]}
    raised.watch.ended(0, RANKS[0], 1, str(said))
    (failed,) = raised.reports
    assert isinstance(failed, ev.ScriptFailed)
    assert (failed.cause, failed.evidence) == ("script", ("train.py:7, in step",))


def test_secrets_of_the_script_are_not_journaled(tmp_path: Path) -> None:
    said = tmp_path / "stderr.log"
    said.write_text(f"GET x?X-Amz-Signature=hunter2\n{'x' * 170} http://me:hunter2{'2' * 40}@proxy\n")
    killed = Watched()
    killed.watch.ended(0, RANKS[0], -9, str(said))
    raised = Watched()
    raised.heard.failed[0] = {"failed": "ValueError: token=hunter2", "at": ["password=hunter2"]}
    told = [*killed.reports, *raised.end(1), *misused().end(2)]
    assert len(told) == 3
    assert "hunter2" not in str(told)
    assert "token=***" in str(told)


def misused() -> Watched:
    watched = Watched()
    watched.heard.failed[0] = {"failed": "cannot open s3://me:hunter2@host", "usage": True}
    return watched


@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        (MEMORY, -signal.SIGBUS, Cause.MACHINE),
        (XID, -signal.SIGKILL, Cause.DEVICE),
        (LINK, -signal.SIGKILL, Cause.SIGNAL),
        (AFTERMATH, -signal.SIGKILL, Cause.SIGNAL),
        (AFTERMATH, -signal.SIGSEGV, Cause.NATIVE),
    ],
)
def test_the_kernel_knows_of_hardware(text: str, code: int, cause: Cause, tmp_path: Path) -> None:
    kernel = Kernel(tmp_path / "kmsg")
    watched = Watched(kernel_log=kernel.log)
    kernel.say(text)
    (lost,) = watched.end(code)
    assert isinstance(lost, ev.MachineLost)
    assert (lost.cause, lost.evidence) == (cause, said(text))
    watched.watch.ended(1, RANKS[1], -signal.SIGABRT)
    assert isinstance(watched.reports[-1], ev.MachineLost)
    assert watched.reports[-1].cause == Cause.NATIVE  # the message has explained one end


@pytest.mark.parametrize(("cause", "evidence"), [(Cause.DEVICE, said(XID)), (Cause.SCRIPT, ())])
def test_the_kernel_knows_more_of_an_error(cause: Cause, evidence: tuple[str, ...], tmp_path: Path) -> None:
    kernel = Kernel(tmp_path / "kmsg")
    watched = Watched(kernel_log=kernel.log)
    kernel.say(XID, LINK)
    watched.heard.sessions.clear()
    watched.heard.failed[0] = {"failed": "AcceleratorError: CUDA error", "cause": cause}
    (failed,) = watched.end(1)
    assert isinstance(failed, ev.ScriptFailed)
    assert failed.evidence == evidence


ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"
NVLINK = "AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution"
ILLEGAL = "AcceleratorError: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("failed", "kernel_says", "sessions", "is_lost"),
    [
        (ECC, (), True, True),
        (NVLINK, (), True, True),
        (ILLEGAL, (XID,), True, True),
        (ILLEGAL, (), True, False),
        (ILLEGAL, (AFTERMATH,), True, False),
        (ECC, (XID,), False, False),
    ],
)
def test_a_broken_device_costs_its_machine_and_not_the_run(
    failed: str, kernel_says: tuple[str, ...], sessions: bool, is_lost: bool, tmp_path: Path
) -> None:
    kernel = Kernel(tmp_path / "kmsg")
    watched = Watched(kernel_log=kernel.log, sessions=sessions)
    kernel.say(*kernel_says)
    watched.heard.failed[0] = {"failed": failed, "cause": "device", "at": ["train.py:7, in step"]}
    (event,) = watched.end(1)
    assert isinstance(event, ev.MachineLost if is_lost else ev.ScriptFailed)
    assert (event.reason, event.cause) == (f"worker 4: {failed}", "device")
    assert event.evidence == ("train.py:7, in step", *said(*kernel_says))


def test_a_silent_worker_is_given_up() -> None:
    watched = Watched()
    watched.silent_for(SILENCE_S - 1)
    assert watched.check() == []
    watched.silent_for(SILENCE_S + 1)
    assert watched.check() == [0, 1]
    assert [type(report) for report in watched.reports] == [ev.MachineLost, ev.MachineLost]
    assert watched.check() == [0, 1]  # each once


@pytest.mark.parametrize(
    ("letters", "kernel_says", "cause"),
    [
        ("TT", (), Cause.SIGNAL),
        ("tt", (), Cause.SIGNAL),
        ("DD", (), Cause.MACHINE),
        ("DD", (DISK,), Cause.STORE),
        ("DD", (XID,), Cause.DEVICE),
        ("DR", (), Cause.SCRIPT),
        ("RR", (XID,), Cause.SCRIPT),
    ],
)
def test_the_state_of_a_silent_worker_says_whose_fault_it_is(
    letters: str,
    kernel_says: tuple[str, ...],
    cause: Cause,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel(tmp_path / "kmsg")
    watched = Watched(kernel_log=kernel.log)
    kernel.say(*kernel_says)
    looks = iter(letters)
    monkeypatch.setattr(worker_watch, "process_state", lambda _: next(looks, letters[-1]))
    monkeypatch.setattr(worker_watch, "is_stopped", lambda _: letters[0] in "Tt")
    monkeypatch.setattr(watched.watch, "_answers", lambda *_: False)
    watched.silent_for(SILENCE_S + 1)
    watched.check()
    lost = watched.reports[0]
    assert isinstance(lost, ev.MachineLost)
    assert lost.reason.startswith("worker 4 was silent for 4 s: ")
    assert (lost.cause, lost.evidence) == (cause, said(*kernel_says))


@pytest.mark.parametrize(("letter", "killed"), [("T", [0]), ("t", [])])
def test_a_signal_may_not_stop_a_worker_for_long_and_a_debugger_may(
    letter: str, killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    watched.silent_for(SILENCE_S - 1)
    now = time.monotonic()
    monkeypatch.setattr(worker_watch, "process_state", {100: letter, 101: "R"}.__getitem__)
    monkeypatch.setattr(worker_watch, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(2 * timings.STOPPED_LOOKS):
        watched.check(pids={0: 100, 1: 101})
        now += SILENCE_S / 2 / timings.STOPPED_LOOKS
    assert watched.killed == killed
    assert [report.reason for report in watched.reports if isinstance(report, ev.MachineLost)] == [
        "worker 4 was stopped by a signal for 2 s" for _ in killed
    ]


def test_a_worker_that_is_gone_may_be_killed_again() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    processes = SimpleNamespace(_pids={0: ended.pid})
    StandbyContext.kill(cast(StandbyContext, processes), 0)
