"""Members of etcd are killed under a job: any one costs nothing, and of two only a recovery takes notice."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from benchmarks.lib.etcd import EtcdCluster
from swift_ft.coordination.block_log import block_log_in
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.store_client import connect
from swift_ft.recovery.job_state import Phase, State
from swift_ft.store_address import StoreAddress
from tests.support.cluster import (
    SLOW_UNTIL_TOLD,
    ClusterRun,
    assert_clean,
    assert_identical,
    command,
    processes_of,
    run_cluster,
    training,
)
from tests.support.waiting import wait_until

MACHINES = 2
ITERATIONS = 10
LOSS = "kill machine=1 iteration=5 point=forward microbatch=3"
_END_S = 150.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = run_cluster(folder, machines=MACHINES, script=training(folder, iterations=ITERATIONS))
    assert run.code == 0, run.output[-3000:]
    return run


def in_etcd(etcd: EtcdCluster, folder: Path) -> list[str]:
    return [
        *("--rdzv-backend", "etcd-v3", "--rdzv-endpoint", etcd.endpoints),
        *("--endpoint-out", str(folder / "endpoint.txt")),
        *("--machine-silence", "10"),  # what is only slow on a busy host shall not count as lost
    ]


@contextmanager
def once(folder: Path, due: Callable[[State], bool], act: Callable[[], None]) -> Iterator[threading.Event]:
    """Act as soon as the state of the run in a folder is so. Yields what says that it was done."""
    done, over = threading.Event(), threading.Event()

    def look(_before: State, after: State) -> None:
        if not done.is_set() and due(after):
            act()
            done.set()

    def follow() -> None:
        file = folder / "endpoint.txt"
        wait_until(lambda: over.is_set() or (file.exists() and file.read_text().endswith("\n")), str(file))
        if over.is_set():
            return
        endpoint, run_id = file.read_text().split()
        client = partial(connect, StoreAddress.parse(endpoint), run_id)
        Follower(open_journal(client, by="test"), on_change=look).start()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join(30.0)


def a_recovery_is(phase: Phase) -> Callable[[State], bool]:
    if phase == Phase.LIVE:  # before the loss
        return lambda state: state.phase == Phase.LIVE
    return lambda state: state.generation > 1 and state.phase == phase


@pytest.mark.parametrize("phase", [Phase.LIVE, Phase.AGREEING, Phase.RECOVERING])
@pytest.mark.parametrize("member", ["the leader", "another"])
def test_any_member_may_die_in_any_phase(
    tmp_path: Path, etcd: EtcdCluster, reference: ClusterRun, member: str, phase: Phase
) -> None:
    """Together with a machine, or before it, or while the others recover."""
    leader = etcd.leader()
    victim = leader if member == "the leader" else (leader + 1) % 3
    with once(tmp_path, a_recovery_is(phase), lambda: etcd.kill(victim)) as killed:
        run = run_cluster(
            tmp_path,
            machines=MACHINES,
            flags=in_etcd(etcd, tmp_path),
            inject=LOSS,
            script=training(tmp_path, iterations=ITERATIONS),
        )
    assert killed.is_set()
    assert len(etcd.running) == 2
    assert_identical(run, reference)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]


def test_a_frozen_leader_is_passed_over(tmp_path: Path, etcd: EtcdCluster, reference: ClusterRun) -> None:
    """It takes connections and says nothing. When it thaws, nothing that it still does counts twice."""
    leader = etcd.leader()
    with once(tmp_path, a_recovery_is(Phase.AGREEING), lambda: etcd.freeze(leader)) as frozen:
        run = run_cluster(
            tmp_path,
            machines=MACHINES,
            flags=in_etcd(etcd, tmp_path),
            inject=LOSS,
            script=training(tmp_path, iterations=ITERATIONS),
        )
    assert frozen.is_set()
    assert_identical(run, reference)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]


class Job:
    """A run whose output can be read while it goes on."""

    def __init__(self, folder: Path, etcd: EtcdCluster, inject: str) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        script = training(folder, SLOW_UNTIL_TOLD, iterations=ITERATIONS)
        flags = in_etcd(etcd, folder)
        line = command(folder, machines=MACHINES, flags=flags, inject=inject, script=script)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SWIFT_TEST_FOLDER": str(folder),
            "QUICK": str(ITERATIONS),
        }
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                line, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def has_said(self, text: str) -> bool:
        assert self.process.poll() is None, self.output.read_text()[-3000:]
        return text in self.output.read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: self.has_said(text), text)

    def end(self) -> ClusterRun:
        (self.folder / "go").touch()
        code = self.process.wait(_END_S)
        assert not processes_of(self.folder)
        report = json.loads((self.folder / "events.json").read_text())
        return ClusterRun(self.folder, code, self.output.read_text(), report)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@pytest.fixture
def job(tmp_path: Path, etcd: EtcdCluster) -> Iterator[Callable[[str], Job]]:
    jobs: list[Job] = []

    def start(inject: str) -> Job:
        jobs.append(Job(tmp_path, etcd, inject))
        return jobs[-1]

    yield start
    for started in jobs:
        started.stop()


@pytest.mark.thorough
def test_without_quorum_training_goes_on_and_a_recovery_waits(
    etcd: EtcdCluster, reference: ClusterRun, job: Callable[[str], Job]
) -> None:
    """It waits with a warning on the console, and goes on once two of three members are back."""
    run = job("kill machine=1 iteration=7 point=forward microbatch=3")
    run.wait_for("iteration 1: loss")
    etcd.kill(0, 1)
    assert not run.has_said("iteration 5: loss")
    run.wait_for("iteration 6: loss")  # several iterations without quorum, and then a machine dies
    run.wait_for("has not answered for")
    assert not run.has_said("machine 1 is lost")  # nobody could write it down
    assert not run.has_said("iteration 7: loss")
    etcd.start(0)
    ended = run.end()
    assert_identical(ended, reference)
    assert_clean(ended)
    assert [recovery["mode"] for recovery in ended.recoveries] == ["replay"]
    assert "answers again" in ended.output


@pytest.mark.thorough
def test_all_members_may_be_gone_for_a_while(
    etcd: EtcdCluster, reference: ClusterRun, job: Callable[[str], Job]
) -> None:
    """They keep on their disks what the job has written."""
    run = job("kill machine=1 iteration=8 point=forward microbatch=3")
    run.wait_for("iteration 1: loss")
    etcd.kill(0, 1, 2)
    run.wait_for("has not answered for")
    etcd.start(0, 1, 2)
    ended = run.end()
    assert_identical(ended, reference)
    assert [recovery["mode"] for recovery in ended.recoveries] == ["replay"]


def test_history_stays_small(etcd: EtcdCluster) -> None:
    """Of thousands of blocks with snapshots now and then, etcd keeps what a newcomer needs."""
    log = block_log_in(connect(StoreAddress.etcd(etcd.endpoints), f"run-{time.time_ns()}"))
    sizes = []
    text = "x" * 4000
    for number in range(3000):
        log.append(text, f"block.{number}")
        if number % 250 == 249:
            log.put_snapshot("y" * 100_000, number)
            log.delete_before(number - 50)
            status = etcd.status(etcd.leader())
            assert status is not None
            sizes.append(int(status["dbSizeInUse"]))
    assert log.first() == 2949
    assert max(sizes[4:]) < 1.5 * max(sizes[:4]), sizes  # 12 MB were written, and it does not grow
