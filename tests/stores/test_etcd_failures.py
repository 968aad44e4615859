"""Members of etcd are killed under a job: any one costs nothing, and of two only a recovery takes notice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.lib.etcd import EtcdCluster
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.block_log import block_log_in
from swift_ft.coordination.store_client import connect
from swift_ft.recovery.job_state import Phase
from tests.support.cluster import (
    ClusterRun,
    assert_clean,
    assert_identical,
    run_cluster,
    training,
)
from tests.support.rendezvous import ENDPOINT, a_recovery_is, once
from tests.support.told import ToldJob

MACHINES = 2
ITERATIONS = 10
LOSS = "kill machine=1 iteration=5 point=forward microbatch=3"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = run_cluster(folder, machines=MACHINES, script=training(folder, iterations=ITERATIONS))
    assert run.code == 0, run.output[-3000:]
    return run


def in_etcd(etcd: EtcdCluster, folder: Path) -> list[str]:
    return [
        *("--rdzv-backend", "etcd-v3", "--rdzv-endpoint", etcd.endpoints),
        *("--endpoint-out", str(folder / ENDPOINT)),
        *("--machine-silence", "10"),  # what is only slow on a busy host shall not count as lost
    ]


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


@pytest.fixture
def job(tmp_path: Path, etcd: EtcdCluster) -> Iterator[Callable[[str], ToldJob]]:
    jobs: list[ToldJob] = []

    def start(inject: str) -> ToldJob:
        flags = in_etcd(etcd, tmp_path)
        steps = {"iterations": ITERATIONS, "quick": ITERATIONS}
        jobs.append(ToldJob(tmp_path, machines=MACHINES, flags=flags, inject=inject, **steps))
        return jobs[-1]

    yield start
    for started in jobs:
        started.stop()


@pytest.mark.thorough
def test_without_quorum_training_goes_on_and_a_recovery_waits(
    etcd: EtcdCluster, reference: ClusterRun, job: Callable[[str], ToldJob]
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
    etcd: EtcdCluster, reference: ClusterRun, job: Callable[[str], ToldJob]
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
