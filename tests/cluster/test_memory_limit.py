"""The kernel ends processes of a run for want of memory: a real control group with a limit."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_ft.costs.layer_profile import read_layers
from swift_ft.costs.shared_machines import balanced
from tests.support.cluster import (
    DEADLINE_S,
    EXAMPLES,
    ClusterRun,
    assert_identical,
    assert_same_layers,
    command,
    run_cluster,
    training,
)
from tests.support.hosts import Hosts
from tests.support.memory_limit import memory_limit
from tests.support.worlds import CHANGES_WORLD, given_up, worlds_of

LIMIT = 4_000_000_000
"""Bytes: twice as much as the launcher and its workers take. Whoever takes them all is the largest."""
WHY = "the kernel was out of memory, of which 4.00 GB are allowed"
SCRIPTS = Path(__file__).parent / "scripts"


def run_limited(folder: Path, script: Path, *flags: str, iterations: int, **variables: str) -> ClusterRun:
    """A run whose processes have this limit together."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = training(folder, script, iterations=iterations)
    words = command(folder, machines=2, flags=[*flags], script=whole)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SWIFT_TEST_FOLDER": str(folder), **variables}
    with memory_limit(LIMIT) as members:
        joined = ["sh", "-c", f'echo $$ > {members} && exec "$@"', "sh", *words]
        done = subprocess.run(
            joined, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, env=env
        )
    report: dict[str, Any] = json.loads((folder / "events.json").read_text())
    return ClusterRun(folder, done.returncode, done.stdout, report)


def test_a_next_world_that_takes_all_memory_is_given_up(tmp_path: Path) -> None:
    """The kernel ends its worker. The present world trains on as if nothing had been, and says why."""
    changes = json.dumps([(3, [1, 0], [])])
    run = run_limited(
        tmp_path / "limited",
        CHANGES_WORLD,
        iterations=60,
        STARVED="takes all",
        EXAMPLE="starved_next",
        CHANGES=changes,
    )
    assert run.code == 0, run.output[-3000:]
    assert not worlds_of(run)
    assert not run.recoveries
    killed = [reason for reason in given_up(run) if "was killed by" in reason]  # others: the run ends first
    assert killed
    assert all(WHY in reason for reason in killed), killed
    script = training(tmp_path / "undisturbed", EXAMPLES / "train_elastic.py", iterations=60)
    assert_identical(run, run_cluster(tmp_path / "undisturbed", machines=2, script=script))


@pytest.mark.parametrize("always", [False, True])
def test_a_worker_that_takes_all_memory(always: bool, tmp_path: Path) -> None:
    """Once, and it is replaced. At the same place again, and the run ends with the cause."""
    run = run_limited(
        tmp_path / "limited",
        SCRIPTS / "starved_worker.py",
        "--spares=2",
        iterations=12,
        ALWAYS=str(int(always)),
    )
    incidents = run.report["incidents"]
    assert run.code == (1 if always else 0), run.output[-3000:]
    assert {incident["cause"] for incident in incidents} == {"out of memory"}, incidents
    assert len(incidents) == (2 if always else 1)
    assert all(WHY in incident["reason"] for incident in incidents)
    assert "let the script use less memory, or give the machine more" in run.output


LARGE = ("--checkpoint-every=100", "--microbatches=2", "--microbatch-size=1")
EACH = 1_300_000_000
"""Bytes: a machine with one of the two large layers takes at most 1.23 GB, and with both 1.35 GB at least."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    """Both large layers are on the first of two machines, which have enough memory."""
    folder = tmp_path_factory.mktemp("measured")
    script = [*training(folder, SCRIPTS / "large_layers.py", iterations=12), *LARGE]
    return run_cluster(folder, machines=2, script=script)


def on_small_machines(folder: Path, *costs: str) -> Hosts:
    """A run on two machines, each of which has its own limit."""
    hosts = Hosts(folder, 12)
    hosts.script = [*training(folder, SCRIPTS / "large_layers.py", iterations=12), *LARGE, *costs]
    with ExitStack() as limits:
        for number in range(2):
            members = limits.enter_context(memory_limit(EACH, f"-{number}"))
            members.write_text(str(hosts.start(f"machine-{number}", number).pid))
        hosts.end()
    return hosts


def test_stages_get_no_more_than_their_machines_have_memory_for(measured: ClusterRun, tmp_path: Path) -> None:
    """The earlier run has measured enough. By time alone both large layers would be on the first machine."""
    (costs,) = measured.folder.glob("store/runs/*/layers.json")
    assert balanced(read_layers(costs), ["0", "1"])[0] >= 2
    hosts = on_small_machines(tmp_path, f"--costs={costs}")
    assert [process.returncode for process in hosts.processes.values()] == [0, 0], hosts.output("machine-0")
    run = ClusterRun(tmp_path, 0, "", {})
    assert_same_layers(run, measured)
    assert [len({name.split(".")[0] for name in weights}) for weights in stages_of(run)] == [1, 9]


@pytest.mark.thorough
def test_layers_that_do_not_fit_end_the_run_with_the_cause(tmp_path: Path) -> None:
    hosts = on_small_machines(tmp_path)
    assert [process.returncode for process in hosts.processes.values()] == [1, 1]
    assert "machine 0 ran out of memory 2 times without progress" in hosts.output("machine-0")


def stages_of(run: ClusterRun) -> list[dict[str, torch.Tensor]]:
    """The weights of each worker."""
    return [torch.load(path) for path in sorted(run.folder.glob("weights/rank*.pt"))]
