"""While nothing fails, training does not wait for the rendezvous store: one that stalls costs no step.

In a recovery each machine asks it for as much, however many there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import EXAMPLES, ClusterRun, assert_identical, once, run_cluster, training

SCRIPTS = Path(__file__).parent / "scripts"
BY_HAND = SCRIPTS / "by_hand.py"
ITERATIONS = 16
SINCE = 2
"""The first iterations publish shapes of messages, and the order in which gradients are averaged."""
FREEZE = (5, 14)
"""Meanwhile checkpoints are due, on disk and in memory, and what workers have measured is published."""


class Job:
    """A training of one kind, on so many machines."""

    def __init__(self, script: Path, machines: int, *args: str, **env: str) -> None:
        self.script, self.machines, self.args, self.env = script, machines, args, env

    def run(self, folder: Path, freeze: tuple[int, int] | None = None, inject: str = "") -> ClusterRun:
        watch = {"script": str(self.script), "since": SINCE, "freeze": freeze}
        command = training(folder, SCRIPTS / "watches_store.py", iterations=ITERATIONS)
        if self.script == BY_HAND:
            places = ["--store", str(folder / "store"), "--weights-out", str(folder / "weights")]
            command = [command[0], *places, "--iterations", str(ITERATIONS), "--checkpoint-every", "3"]
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("WATCH", json.dumps(watch))
            for name, value in self.env.items():
                environment.setenv(name, value.format(folder=folder))
            flags = ["--machine-silence", "30"]  # a busy machine is none that is lost
            machines = self.machines
            run = run_cluster(
                folder, *self.args, inject=inject, machines=machines, flags=flags, script=command
            )
        assert run.code == 0, run.output[-6000:]
        assert len(run.recoveries) == bool(inject)
        return run

    def seen(self, run: ClusterRun) -> Mapping[int, dict[str, Any]]:
        """What each worker noted."""
        return {r: json.loads((run.folder / f"store{r}.json").read_text()) for r in range(self.machines)}


JOBS = {
    "a pipeline": Job(EXAMPLES / "train_swift.py", 2),
    "replicas, and functions between steps": Job(SCRIPTS / "between_steps.py", 2, "--ddp"),
    "a pipeline, and functions between steps": Job(SCRIPTS / "between_steps.py", 2),
    "pipelines that are replicas by layer": Job(EXAMPLES / "train_elastic.py", 4, "--pipelines", "2"),
    "shares of global batches": Job(
        SCRIPTS / "sees_samples.py",
        2,
        SAMPLES="800",
        BATCH="40",
        LOADERS="0",
        UNLIKE="0",
        SAMPLE_LOG="{folder}/log",
    ),
    "shards, copied to memory": Job(BY_HAND, 2, "--fully-shard", "--snapshot-every", "2"),
    "copies in memory, as often as they pay": Job(BY_HAND, 2, "--snapshot-every", "auto"),
}
FROZEN = ["a pipeline", "replicas, and functions between steps", "shards, copied to memory"]
Healthy = Callable[[str], ClusterRun]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """Runs that nothing disturbs, by their kind."""
    return once(tmp_path_factory, lambda folder, kind: JOBS[kind].run(folder))


@pytest.mark.parametrize("kind", JOBS)
def test_a_training_thread_asks_the_store_for_nothing(kind: str, healthy: Healthy) -> None:
    for rank, seen in JOBS[kind].seen(healthy(kind)).items():
        assert seen["steps"] == ITERATIONS - SINCE
        assert seen["elsewhere"], "the calls of the start are not seen, so none would be"
        assert not seen["calls"], f"worker {rank} asks in a step:\n" + "\n".join(map("".join, seen["calls"]))


@pytest.mark.parametrize("kind", FROZEN)
def test_no_step_waits_for_a_store_that_stalls(kind: str, healthy: Healthy, tmp_path: Path) -> None:
    run = JOBS[kind].run(tmp_path, FREEZE)
    first = JOBS[kind].seen(run)[0]
    assert not first["late"], "training waited for the store"
    assert first["thawed_in"] == FREEZE[1]
    assert_identical(run, healthy(kind))
    commits = {event["iteration"] for event in run.events("CheckpointCommitted")}
    assert ITERATIONS - ITERATIONS % 3 in commits, "the last checkpoint counts, though the store stalled"


def test_a_recovery_asks_no_more_of_the_store_per_machine_where_there_are_more(tmp_path: Path) -> None:
    """What the survivors' own threads ask for, from the loss until training continues; not what gloo does."""
    asked = {}
    for machines in (4, 6):
        job = Job(EXAMPLES / "train_swift.py", machines)
        run = job.run(
            tmp_path / str(machines), inject="kill machine=1 iteration=5 point=forward microbatch=3"
        )
        seen = [noted["recoveries"] for rank, noted in job.seen(run).items() if rank != 1]
        assert all(len(counts) == 2 for counts in seen), seen  # the start, and the recovery
        asked[machines] = sum(counts[-1] for counts in seen)
    assert asked[4] >= 3
    # A wait that lasts asks once more. In proportion to the machines they would ask 1.7 times as much.
    assert asked[6] / 5 <= asked[4] / 3 + 1, asked
