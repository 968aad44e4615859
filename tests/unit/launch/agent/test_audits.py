"""Audits by an agent: what one has left whose agent was killed, and a store that it cannot open."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import selectors
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_ft.config.run_config import RunConfig
from swift_ft.launch.agent import audits
from swift_ft.launch.agent.audits import Auditor, AuditProcess, locked_folder, sweep_left
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.recovery import events as ev
from swift_ft.recovery.audit_orders import AuditOrder
from swift_ft.recovery.audits import Interval
from swift_ft.recovery.job_state import State
from swift_ft.storage.store_url import StoreUrl
from swift_ft.testing.scenario import Scenario


def test_only_what_nobody_holds_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (left, gone), (held, lock) = locked_folder(), locked_folder()
    os.close(gone)  # as when its agent is killed
    other = tmp_path / "swift-other"
    for folder in (left, held, other):
        (folder / "out").mkdir(parents=True)
        (folder / "out" / "state").touch()
    sweep_left(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([held.name, other.name])
    assert (held / "out" / "state").exists()
    os.close(lock)
    sweep_left(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


def is_locked(folder: Path) -> bool:
    other = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(other)
    return False


def test_a_folder_is_locked_until_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another audit deletes it, too, and waits for that."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, lock = locked_folder()
    found, deleted = list[bool](), threading.Event()

    def rmtree(path: Path, ignore_errors: bool) -> None:
        found.append(is_locked(path))
        found.append(threading.current_thread() is threading.main_thread())
        deleted.set()

    monkeypatch.setattr("shutil.rmtree", rmtree)
    standby: Any = SimpleNamespace(launch_audit=lambda channel: channel.close())
    request: Any = None
    AuditProcess(standby, request, AuditOrder(Interval(0, 20), 0), folder, lock).end()
    assert deleted.wait(10)
    assert found == [True, False]


SPARE = """
open 2
join A B
join S
report all nothing
committed 0 keep=2
committed 20 keep=2
expect audit S 0 0..20
"""


def membership(url: str) -> JournalRendezvous:
    """A spare's, in a job whose session uses this store. It has no journal: to use it fails."""
    parsed = StoreUrl.parse(url)
    facts = json.dumps({"store": str(parsed), "secret": parsed.has_credentials})
    made: Any = JournalRendezvous.__new__(JournalRendezvous)
    made.store = SimpleNamespace(check=lambda keys: True, get=lambda key: facts)
    made.machine = "S"
    return cast("JournalRendezvous", made)


def test_a_full_disk_ends_the_audit_and_not_the_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, path = Scenario(), tmp_path / "scenario.txt"
    path.write_text(f"{SPARE}audits S 0 0..20")
    scenario.run(path)
    swept, told = list[threading.Thread](), list[ev.Event]()
    monkeypatch.setattr(audits, "sweep_left", lambda folder: swept.append(threading.current_thread()))
    monkeypatch.setattr("tempfile.mkdtemp", full)
    config = RunConfig(audit=True, on_corruption="back")
    settings: Any = SimpleNamespace(config=config, kind="script", target="", args=())
    spare, for_standby = membership("sftp://host/run"), cast("Any", None)
    spare.follower = follower(scenario, told)
    with selectors.DefaultSelector() as selector:
        Auditor(settings, for_standby, spare, selector).look(scenario.state)
    (ended,) = told
    assert isinstance(ended, ev.AuditEnded)
    assert "No space left" in ended.problem
    assert ended.on_corruption == "back"
    assert threading.main_thread() not in swept


def follower(scenario: Scenario, told: list[ev.Event]) -> Any:
    def append(event: ev.Event) -> State:
        told.append(event)
        scenario.apply(event)
        return scenario.state

    return SimpleNamespace(state=scenario.state, append=append)


JUDGED = f"""{SPARE}
join T
audits S 0 0..20
audited S 0 0..20 slots=0
audits S 1 0..20
audited S 1 0..20 at=9 digest=x
audits T 1 0..20
audited T 1 0..20 at=9 digest=x then=back
"""


@pytest.mark.parametrize(
    ("machine", "then", "done"),
    [
        ("S", "", [ev.CheckpointsDoubted, ev.MachineLost]),
        ("T", "", []),
        ("T", "lost S", [ev.CheckpointsDoubted, ev.MachineLost]),
        ("A", "lost S\nlost T", [ev.CheckpointsDoubted, ev.DrainRequested]),
    ],
)
def test_what_is_due_is_done_by_one_that_is_there(
    machine: str, then: str, done: list[type[ev.Event]], tmp_path: Path
) -> None:
    """The one that found out may be gone, and members have no store to audit with."""
    scenario, path, told = Scenario(), tmp_path / "scenario.txt", list[ev.Event]()
    path.write_text(JUDGED + then)
    scenario.run(path)
    settings: Any = SimpleNamespace(config=RunConfig(audit=True), kind="script")
    agent, for_standby = membership("sftp://me:word@host/run"), cast("Any", None)
    agent.machine, agent.follower = machine, follower(scenario, told)
    with selectors.DefaultSelector() as selector:
        Auditor(settings, for_standby, agent, selector).look(scenario.state)
    assert [type(event) for event in told] == done


def full(prefix: str) -> str:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_store_that_only_the_script_can_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and no audit is begun that could not end."""
    scenario, path = Scenario(), tmp_path / "scenario.txt"
    path.write_text(SPARE)
    scenario.run(path)
    settings: Any = SimpleNamespace(config=RunConfig(audit=True), kind="script")
    for_standby: Any = None
    with selectors.DefaultSelector() as selector:
        auditor = Auditor(settings, for_standby, membership("sftp://me:word@host/run"), selector)
        auditor.look(scenario.state)
        auditor.look(scenario.state)
        other = Auditor(settings, for_standby, membership("sftp://host/run"), selector)
        with pytest.raises(AttributeError):  # it has something to audit, and no journal
            other.look(scenario.state)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the URL of sftp://host/run has credentials in it" in line
    assert "word" not in line
