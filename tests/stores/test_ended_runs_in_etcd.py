"""``swift-recover gc etcd-v3://...``: the keys of runs that have ended."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.lib.etcd import EtcdCluster, binary
from swift_ft.cli.recover import gc
from swift_ft.cli.recover.main import main
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination import runs
from swift_ft.coordination.etcd.stored_runs import delete_run, stored_runs
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.runs import find_run
from swift_ft.coordination.store_client import connect
from swift_ft.recovery import events as ev
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

Open = Callable[[str], RendezvousStore]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    """One member that has no runs yet."""
    cluster = EtcdCluster(tmp_path / "etcd", 1)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def opened(etcd: EtcdCluster) -> Open:
    address = StoreAddress.etcd(etcd.endpoints)
    return lambda run_id: connect(address, run_id)


def a_run(opened: Open, name: str, *, ends: bool) -> str:
    run_id = find_run(opened, name)
    journal = open_journal(partial(opened, run_id), by="test")
    journal.append(ev.JobOpened(machines=1))
    if ends:
        journal.append(ev.JobClosed(reason="it is over"))
    return run_id


def test_runs_that_have_ended_are_deleted_after_a_while(
    etcd: EtcdCluster, opened: Open, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest of a name, too: the next one begins anew. What has not ended keeps all its keys."""
    place = f"etcd-v3://{etcd.endpoints}"
    ended = [a_run(opened, "a name/with.1-strange characters", ends=True) for _ in range(2)]
    other, lives = a_run(opened, "other", ends=True), a_run(opened, "lives", ends=False)
    assert ended[0] != ended[1]

    assert main(["gc", place]) == 0  # all of them have just ended
    assert "0 of 4 runs deleted" in capfd.readouterr().out
    monkeypatch.setattr(gc, "_RESTS_S", 0.0)
    assert main(["gc", place, "--dry-run", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert {run["run_id"]: run["garbage"] for run in report["runs"]} == {
        **dict.fromkeys((*ended, other), True),
        lives: False,
    }
    before = {run.run_id: run.keys for run in stored_runs(StoreAddress.etcd(etcd.endpoints))}
    assert len(before) == 4

    assert main(["gc", place]) == 0
    told = capfd.readouterr().out
    assert "3 of 4 runs deleted" in told
    assert f"{lives}: stays: has not ended, last event " in told
    assert {run.run_id: run.keys for run in stored_runs(StoreAddress.etcd(etcd.endpoints))} == {
        lives: before[lives]
    }
    # The names of runs stay: a launcher that waits alone with a mistyped one says which there are.
    assert keys_in(etcd) == {f"swift/{lives}", "swift/lives", "swift/names-of-runs"}
    assert find_run(opened, "lives") == lives
    assert find_run(opened, "other") not in ("", other)


def test_a_launcher_never_joins_a_run_that_was_deleted(
    opened: Open, etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read which run is the newest, and then all its keys go."""
    old = a_run(opened, "raced", ends=True)
    is_ended = runs.is_ended

    def deleted_before(open_: Callable[[], RendezvousStore]) -> bool:
        delete_run(StoreAddress.etcd(etcd.endpoints), old)
        return is_ended(open_)

    monkeypatch.setattr(runs, "is_ended", deleted_before)
    new = find_run(opened, "raced")
    assert new != old
    assert find_run(opened, "raced") == new


def test_mistakes_are_told_in_one_line(etcd: EtcdCluster, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", f"etcd-v3://{etcd.endpoints}", "--yes"]) == 2
    assert "only a run that has ended is deleted" in capfd.readouterr().err
    assert main(["gc", "etcd-v3://nowhere"]) == 2
    assert "is not an endpoint" in capfd.readouterr().err


def keys_in(etcd: EtcdCluster) -> set[str]:
    """The first two parts of each key."""
    command = [str(binary("etcdctl")), "--endpoints", etcd.endpoints, "get", "--prefix", "--keys-only", ""]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return {"/".join(key.split("/")[:2]) for key in done.stdout.split()}
