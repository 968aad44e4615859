"""Every sample of an epoch is trained on once and in order, whatever is lost, on however many machines.

The weights themselves say what they have seen: an update that is undone takes its samples back.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from swift_ft.cli.recover.main import main
from swift_ft.cli.recover.running import following
from swift_ft.data import samples_by_iteration
from swift_ft.data.order import SampleOrder
from tests.support.cluster import EXAMPLES, ClusterRun, one_line, run_cluster, training
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "sees_samples.py"
SAMPLES, BATCH = 10_000, 40
ITERATIONS = SAMPLES // BATCH
SLOTS = 3
POINTS = ("between", "reduce", "reducing", "reduced", "optimizer")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {"SAMPLES": SAMPLES, "BATCH": BATCH, "LOADERS": 0, "UNLIKE": 0, "SAMPLE_LOG": tmp_path / "log"}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))


def run(folder: Path, machines: int, iterations: int, inject: str, *flags: str) -> ClusterRun:
    script = training(folder, SCRIPT, iterations=iterations)
    return run_cluster(folder, machines=machines, inject=inject, script=script, flags=list(flags))


@pytest.mark.parametrize("seed", range(3))
def test_each_sample_once_in_order(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 samples: five runs of other sizes, and in each of them a machine is killed."""
    monkeypatch.setenv("UNLIKE", str(seed % 2))
    draw = random.Random(seed)
    ends = sorted(draw.sample(range(20, ITERATIONS - 20), 4))
    sizes = draw.sample([2, 3, 4, 2, 3], 5)
    begin = 0
    for number, (machines, end) in enumerate(zip(sizes, [*ends, ITERATIONS], strict=True)):
        iteration = draw.randint(begin + 1, max(begin + 1, end - 5))
        victim, point = draw.randrange(machines), draw.choice(POINTS)
        resume = ["--resume"] if number else []
        spares = draw.choice(["0", "1"])  # without one, a survivor runs the lost worker, too
        inject = f"kill machine={victim} iteration={iteration} point={point}"
        found = run(tmp_path, machines, end, inject, "--spares", spares, *resume)
        assert found.code == 0, f"{inject}, {machines} machines: {found.output[-3000:]}"
        assert len(found.recoveries) == 1, inject
        begin = end
    assert_each_once_in_order(tmp_path, replicas=sizes[-1])


def assert_each_once_in_order(folder: Path, replicas: int) -> None:
    """By the weights, and by the samples that were logged."""
    order = SampleOrder([SAMPLES], shuffle=True, seed=5).at(0, SAMPLES)
    expected = torch.empty(SAMPLES, dtype=torch.float64)
    expected[torch.tensor(order)] = torch.arange(SAMPLES, dtype=torch.float64)
    for rank in range(replicas):
        weights = torch.load(folder / "weights" / f"rank{rank}.pt", weights_only=True)
        assert torch.equal(weights["times"], torch.ones(SAMPLES, dtype=torch.float64))
        assert torch.equal(weights["place"], expected)
    seen = samples_by_iteration(folder / "log")
    assert seen == {i: order[i * BATCH : (i + 1) * BATCH] for i in range(ITERATIONS)}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 4))]
)
def test_each_sample_once_in_order_while_machines_come_and_go(
    seed: int, tmp_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job that never ends in between: five kills, and machines that leave on request and come."""
    draw = random.Random(seed)
    acts = _acts(draw)
    gates = [1, *sorted(draw.sample(range(10, ITERATIONS - 50), len(acts) - 1))]
    monkeypatch.setenv("GATES", " ".join(map(str, gates)))
    machines = _Machines(hosts, draw)
    wait_until((hosts.folder / "at-1").exists, machines.outputs, 120)
    machines.filled_slots()
    for gate, act in zip(gates, acts, strict=True):
        wait_until((hosts.folder / f"at-{gate}").exists, machines.outputs, 120)
        machines.change(act)
        (hosts.folder / f"done-{gate}").touch()
    assert {*hosts.end().values()} == {0}
    assert_each_once_in_order(tmp_path, replicas=SLOTS)


def _acts(draw: random.Random) -> list[str]:
    """Five kills, and changes on purpose so that there are always one to three machines."""
    acts: list[str] = []
    machines = SLOTS
    while acts.count("kill") < 5:
        less = ["kill", "kill", draw.choice(["drain", "scale"])] if machines > 1 else []
        acts.append(draw.choice([*less, *["join"] * (machines < SLOTS)]))
        machines += 1 if acts[-1] == "join" else -1
    return acts


class _Machines:
    """The launchers of a job of one to three machines. Which slot each of them fills, the job decides."""

    def __init__(self, hosts: Hosts, draw: random.Random) -> None:
        self._hosts, self._draw = hosts, draw
        self._started = 0
        hosts.script = training(hosts.folder, SCRIPT, iterations=ITERATIONS)
        for _ in range(SLOTS):
            self._start()

    def change(self, act: str) -> None:
        """Do it, and wait until it is done. For a kill nothing waits."""
        processes = self._hosts.processes
        if act == "kill":
            lost = processes.pop(self._draw.choice(sorted(processes)))
            lost.kill()
            lost.wait()
        elif act == "join":
            self._start()
            self.filled_slots()
        else:
            slot = self._draw.choice(self.filled_slots())
            order = (
                ["drain", str(slot)]
                if act == "drain"
                else ["scale", str(len(processes) - 1), "--same-workers"]
            )
            asked = main([*order, "--rdzv-endpoint", self._hosts.endpoint, "--rdzv-id", "hosts"])
            assert asked == 0, self.outputs()
            (left,) = wait_until(self._ended, lambda: f"the end of a machine that left\n{self.outputs()}")
            assert processes.pop(left).returncode == 0

    def filled_slots(self) -> list[int]:
        """The slots that these machines fill, and not guests of them, once each of them does."""
        with following(self._hosts.endpoint, "hosts") as (_, follower):

            def filled() -> list[int]:
                membership = follower.state.membership
                own = [slot for slot, name in membership.members.items() if name not in membership.hosts]
                return sorted(own) if len(own) == len(self._hosts.processes) else []

            found: list[int] = wait_until(filled, lambda: f"all are members\n{self.outputs()}", 120)
            return found

    def outputs(self) -> str:
        """The ends of what all of them have written."""
        return "\n".join(f"{name}:\n{self._hosts.output(name)[-1500:]}" for name in self._hosts.processes)

    def _start(self) -> None:
        self._started += 1
        self._hosts.start(f"host{self._started}", 0, "--nnodes", f"1:{SLOTS}", "--elastic-wait", "0.2")

    def _ended(self) -> list[str]:
        return [name for name, one in self._hosts.processes.items() if one.poll() is not None]


@pytest.mark.parametrize(
    ("loaders", "inject"),
    [
        (0, ""),
        (2, "kill machine=2 iteration=100 point=reduced"),  # while one is slow
        (0, "kill machine=1 iteration=170 point=reducing"),  # the one that was
    ],
)
def test_a_slow_replica_gets_fewer_samples(
    loaders: int, inject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it is slow. Every sample is trained on once and in its place, whoever gets it."""
    settings = {"SLOW": 1, "FROM": 20, "UNTIL": 110, "SAMPLE_MS": 4, "LOADERS": loaders}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    found = run(tmp_path, 3, ITERATIONS, inject, "--stragglers", "rebalance", "--spares", "1")
    assert found.code == 0, found.output[-3000:]
    assert_each_once_in_order(tmp_path, replicas=3)
    shares = [event["shares"] for event in found.report["events"] if event["event"] == "SharesRequested"]
    assert shares, found.output[-3000:]
    assert shares[0][1] < BATCH // 6, shares
    assert shares[-1][1] >= BATCH // 4, f"it is as quick as the others again: {shares}"
    assert f"replicas get {', '.join(map(str, shares[0]))} samples of each batch" in found.output
    assert "weight of its own part" not in found.output


def test_a_data_set_that_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, 2, 7, "").code == 0
    monkeypatch.setenv("LENGTH", "9990")
    other = run(tmp_path, 2, 12, "", "--resume")
    assert other.code == 2
    assert "number of samples was 10000 when this run began, and is 9990 now" in one_line(other)


def test_a_batch_that_cannot_be_dealt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH", "2")
    found = run(tmp_path, 3, 7, "")
    assert found.code == 2
    assert "cannot be dealt to 3 replicas" in one_line(found)


def test_batches_that_do_not_follow_the_replicas(tmp_path: Path) -> None:
    """DistributedSampler deals them anew: a resumed run of another size would see some samples twice."""
    script = training(tmp_path, EXAMPLES / "train_ddp.py", iterations=4)
    assert run_cluster(tmp_path, machines=2, script=script).code == 0
    other = run_cluster(tmp_path, machines=3, script=script, flags=["--resume"])
    assert other.code == 2
    assert "if it began with swift_ft.data.GlobalBatches" in one_line(other)
