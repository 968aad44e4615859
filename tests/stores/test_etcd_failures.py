"""Members of etcd are killed under a job: any one of them costs nothing."""

from __future__ import annotations

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
    ClusterRun,
    assert_identical,
    run_cluster,
    training,
)
from tests.support.waiting import wait_until

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
        *("--endpoint-out", str(folder / "endpoint.txt")),
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


@pytest.mark.parametrize("phase", [Phase.LIVE, Phase.AGREEING, Phase.RECOVERING, Phase.FORMING])
@pytest.mark.parametrize("member", ["the leader", "another"])
def test_any_member_may_die_in_any_phase(
    tmp_path: Path, etcd: EtcdCluster, reference: ClusterRun, member: str, phase: Phase
) -> None:
    """Together with a machine, or before it, or while the others recover."""
    leader = etcd.leader()
    victim = leader if member == "the leader" else (leader + 1) % 3
    spares = ["--spares", "0"] if phase == Phase.FORMING else []  # a spare fills the slot at once
    with once(tmp_path, a_recovery_is(phase), lambda: etcd.kill(victim)) as killed:
        run = run_cluster(
            tmp_path,
            machines=MACHINES,
            flags=[*in_etcd(etcd, tmp_path), *spares],
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
