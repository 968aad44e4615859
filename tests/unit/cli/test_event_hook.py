"""The command of ``--on-event``: real processes, a real rendezvous store, a real console."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from swift_ft.cli.event_hook import EventHook
from swift_ft.cli.event_stream import Line
from swift_ft.coordination.store_client import connect
from tests.support.store_processes import StoreProcess, store_process
from tests.support.waiting import wait_until

TELLER = Path(__file__).parent / "scripts" / "tells_a_story.py"
_CLOSE_S = 60.0


@pytest.fixture
def failures() -> list[str]:
    """What hooks have reported."""
    return []


@pytest.fixture
def service() -> Iterator[StoreProcess]:
    """A rendezvous store in a process of its own."""
    with store_process() as service:
        yield service


def line(event: str, level: str = "warning", position: int | None = 7) -> Line:
    return {"event": event, "level": level, "position": position}


def children() -> list[str]:
    """Children of this process, zombies included."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in found if _parent(pid) == os.getpid()]


def running_in(group: int) -> list[str]:
    """The processes of a group that are not just waiting to be reaped."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, of, *_ = path.read_text().rpartition(")")[2].split()
            if int(of) == group and state not in "ZX":
                found.append(path.parent.name)
    return found


def _parent(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_the_command_gets_the_line_for_warnings_errors_and_the_end(
    tmp_path: Path, failures: list[str]
) -> None:
    before = children()
    hook = EventHook(f"cat >> {tmp_path / 'out'}", failures.append)
    for event in (
        line("machine_lost"),
        line("checkpoint_committed", "info"),
        line("fell_back", "error"),
        line("hook_failed"),
        line("run_ended", "info"),
    ):
        hook(event)
    hook.close(_CLOSE_S)
    told = [json.loads(text)["event"] for text in (tmp_path / "out").read_text().splitlines()]
    assert told == ["machine_lost", "fell_back", "run_ended"]
    assert failures == []
    assert children() == before, "a zombie is left"


def test_a_failure_is_told_once_and_a_slow_command_is_killed_with_its_children(
    tmp_path: Path, failures: list[str]
) -> None:
    before = children()
    slow = EventHook(f"echo $$ > {tmp_path / 'pid'}; sleep 600 & wait", failures.append, limit_s=1.0)
    begin = time.monotonic()
    slow(line("machine_lost"))
    slow(line("fell_back", "error"))
    assert time.monotonic() - begin < 1.0, "the caller waited for the command"
    slow.close(_CLOSE_S)
    assert failures == ["the command of --on-event failed: it was killed after 1 s. The run continues."]
    session = int((tmp_path / "pid").read_text())
    wait_until(lambda: not running_in(session), "the command's own child still runs", _CLOSE_S)
    wrong = EventHook("echo no such channel >&2; exit 3", failures.append)
    wrong(line("machine_lost"))
    wrong(line("machine_lost"))
    wrong.close(_CLOSE_S)
    assert failures[1:] == [
        "the command of --on-event failed: exit code 3: no such channel. The run continues."
    ]
    assert children() == before, "a zombie is left"


def test_more_events_than_may_wait_are_left_out(failures: list[str], tmp_path: Path) -> None:
    (tmp_path / "held").touch()
    hold = f"while [ -e {tmp_path / 'held'} ]; do sleep 0.1; done; cat >> {tmp_path / 'out'}"
    hook = EventHook(hold, failures.append, limit_s=_CLOSE_S)
    for _ in range(80):
        hook(line("machine_lost"))
    (tmp_path / "held").unlink()
    hook.close(_CLOSE_S)
    assert failures == [
        "the command of --on-event failed: 64 events wait for the command already: machine_lost is left out. "
        "The run continues."
    ]
    assert len((tmp_path / "out").read_text().splitlines()) in (64, 65)


def test_launchers_run_it_once_per_event_of_the_journal(
    service: StoreProcess, tmp_path: Path, failures: list[str]
) -> None:
    hooks = [EventHook(f"cat >> {tmp_path / 'out'}", failures.append) for _ in range(3)]
    for hook in hooks:
        hook.agree_in(partial(connect, service.address, "job"))
        hook(line("machine_lost", position=7))
        hook(line("spares_used_up", position=7))
        hook(line("machine_lost", position=9))
        hook(line("log_suspended", position=None))
    for hook in hooks:
        hook.close(_CLOSE_S)
    events = [json.loads(text) for text in (tmp_path / "out").read_text().splitlines()]
    told = sorted(f"{event['event']} {event['position']}" for event in events)
    once = ["machine_lost 7", "machine_lost 9", "spares_used_up 7"]
    assert told == [*["log_suspended None"] * 3, *once]


def test_without_a_store_it_is_run_all_the_same(
    service: StoreProcess, tmp_path: Path, failures: list[str]
) -> None:
    hook = EventHook(f"cat >> {tmp_path / 'out'}", failures.append)
    hook.agree_in(partial(connect, service.address, "job", timeout_s=2.0))
    os.kill(service.pid, signal.SIGKILL)
    hook(line("run_ended", "error"))
    hook.close(_CLOSE_S)
    assert json.loads((tmp_path / "out").read_text())["event"] == "run_ended"


def test_a_launchers_console_runs_it_and_says_that_it_fails(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    command = f"cat >> {out}; exit 3"
    flags = ["--quiet", "--on-event", command, "--events-log", str(log)]
    done = subprocess.run([sys.executable, str(TELLER), *flags], capture_output=True, timeout=120, check=True)
    told = [json.loads(text)["event"] for text in out.read_text().splitlines()]
    assert [name for name in told if name not in ("log_suspended", "launcher_failed")] == [
        "machine_lost",
        "spares_used_up",
        "fell_back",
        "recovery_finished",
        "incident",
        "run_ended",
    ]
    assert {"log_suspended", "launcher_failed"} <= set(told)
    failed = "the command of --on-event failed: exit code 3. The run continues."
    assert done.stderr.decode().count(failed) == 1
    assert "hook_failed" in [json.loads(text)["event"] for text in log.read_text().splitlines()]


def test_a_failure_that_comes_after_the_run_is_told_as_well(tmp_path: Path) -> None:
    """The first command ends when all is over."""
    log = tmp_path / "log"
    flags = ["--quiet", "--on-event", "sleep 0.7; exit 3", "--events-log", str(log)]
    done = subprocess.run([sys.executable, str(TELLER), *flags], capture_output=True, timeout=120, check=True)
    assert done.stderr.decode().count("the command of --on-event failed: exit code 3") == 1
    assert "hook_failed" in [json.loads(text)["event"] for text in log.read_text().splitlines()]
