"""The journal is shortened while machines die and come: no machine, and no archive, misses an event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.block_log import block_log_in
from swift_ft.coordination.store_client import connect
from swift_ft.offline.archive import read_journal
from swift_ft.offline.run_store import open_run_store
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase
from tests.support.cluster import (
    SLOW_UNTIL_TOLD,
    ClusterRun,
    assert_clean,
    assert_identical,
    run_cluster,
    training,
)
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

ITERATIONS, QUICK = 80, 60


def first_block(hosts: Hosts) -> Callable[[], int]:
    """The number of the first block of the journal that is still there."""
    file = hosts.folder / "endpoint"
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"), "the endpoint")
    endpoint, run_id = file.read_text().split()
    return block_log_in(connect(StoreAddress.parse(endpoint), run_id)).first


def run_with_a_short_journal(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> ClusterRun:
    """Two machines come after events were deleted, and replace the two that deleted them."""
    monkeypatch.setenv("QUICK", str(QUICK))
    hosts.module = "tests.cluster.scripts.compacts_often"
    hosts.script = training(hosts.folder, SLOW_UNTIL_TOLD, iterations=ITERATIONS)
    flags = ["--rdzv-id", hosts.folder.name, "--elastic-wait", "120", "--machine-silence", "10"]
    hosts.start("first", 0, *flags, "--endpoint-out", str(hosts.folder / "endpoint"))
    hosts.start("second", 1, *flags)
    first, deleted = first_block(hosts), 0
    for lost, newcomer, other in (("first", "third", "second"), ("second", "fourth", "third")):

        def more_are_deleted(before: int = deleted) -> int:
            return now if (now := first()) > before else 0

        deleted = wait_until(more_are_deleted, "a snapshot that stands for more events")
        killed = hosts.processes.pop(lost)
        killed.kill()
        killed.wait()
        hosts.start(newcomer, 2, *flags)
        hosts.wait_for("all are live", newcomer)
        assert "is lost: " in hosts.output(other)
    (hosts.folder / "go").touch()
    assert hosts.end() == {"third": 0, "fourth": 0}
    run = ClusterRun(hosts.folder, 0, "", {})
    assert_clean(run)
    return run


def check_archive(run: ClusterRun) -> None:
    """It has all events of the run, those that were deleted, too."""
    opened = open_run_store(str(run.store))
    journal = read_journal(opened.store, opened.run_id)
    assert journal.problems == ()
    assert [entry.position for entry in journal.entries] == list(range(len(journal.entries)))
    assert sum(isinstance(entry.event, ev.MachineLost) for entry in journal.entries) >= 2
    assert journal.last_state().phase == Phase.ENDED


def test_machines_come_and_go_while_events_are_deleted(
    hosts: Hosts, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_a_short_journal(hosts, monkeypatch)
    check_archive(run)
    folder = tmp_path_factory.mktemp("undisturbed")
    assert_identical(run, run_cluster(folder, machines=2, script=training(folder, iterations=ITERATIONS)))
