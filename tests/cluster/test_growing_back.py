"""Losses have made a job smaller, and machines come later: it grows back by itself, and no bit changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from swift_ft.config.run_plan import plan_from_json
from swift_ft.data import samples_by_iteration
from tests.cluster.test_survivors import FSDP, HSDP, REPLICAS, SHRINK, arguments, guests_of
from tests.cluster.test_survivors import train as train_anew
from tests.cluster.test_unlike_worlds import assert_same_state, at_end, options, train
from tests.support.cluster import EXAMPLES, SLOW_UNTIL_TOLD, ClusterRun, assert_identical, run_launcher
from tests.support.integrations import assert_same_files
from tests.support.worlds import given_up, worlds_of

ITERATIONS = 60
LATE = "tests.cluster.scripts.late_machines"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    """Two pipelines of two stages that nothing disturbs."""
    return train(tmp_path_factory.mktemp("undisturbed"), machines=4, iterations=ITERATIONS)


def grown(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: Sequence[str],
    *flags: str,
    machines: int = 4,
    args: Sequence[str] = (),
    then: str = "",
) -> ClusterRun:
    """A run of pipelines to its end, in which machines come once all of these losses have struck.

    Then another fault may.
    """
    for name, value in (("EXAMPLE", "shared_batches"), ("QUICK", "1000"), ("LOST", str(len(faults)))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SAMPLE_LOG", str(folder / "samples"))
    script = [str(SLOW_UNTIL_TOLD), *options(folder, *args, iterations=ITERATIONS)]
    all_flags, every = [*SHRINK, *flags], [*faults, then] if then else faults
    inject = "; ".join(every)
    run = run_launcher(LATE, folder, inject=inject, machines=machines, flags=all_flags, script=script)
    assert len(run.events("FaultInjected")) == len(every), "a fault did not strike"
    return run


def asked_by(run: ClusterRun) -> list[str]:
    return [planned["asked_by"] for planned in run.events("ChangePlanned")]


def stages_of(run: ClusterRun) -> list[list[int]]:
    """The number of stages of each pipeline of each world; none for the script's own."""
    plans = [state.worlds.present.plan for state in worlds_of(run)]
    return [[len(one.cut) for one in plan_from_json(plan).pipelines] if plan else [] for plan in plans]


def test_a_machine_that_comes_takes_the_slot_of_a_lost_one(
    tmp_path: Path, undisturbed: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = grown(tmp_path, monkeypatch, ["kill machine=1 iteration=5 point=forward microbatch=1"])
    assert not given_up(run), run.output[-5000:]
    assert not guests_of(run)
    assert [state.world_size for state in worlds_of(run)] == [3, 4]
    assert stages_of(run) == [[1, 2], []]
    assert asked_by(run) == ["--on-loss shrink"] * 2
    assert "machines have come for lost ones: 4 train then" in run.output
    # Those that were there before are where they were.
    first, last = run.events("MachineJoined")[:4], worlds_of(run)[-1]
    before = {joined["preferred_slot"]: joined["machine"] for joined in first}
    assert {slot: last.members[slot] for slot in (0, 2, 3)} == {slot: before[slot] for slot in (0, 2, 3)}
    assert len(at_end(run)) == 4
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
def test_machines_come_one_after_the_other(
    tmp_path: Path, undisturbed: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four are lost. The first one that comes makes one loss good."""
    faults = [
        "kill machine=1 iteration=5 point=forward microbatch=1",
        "kill machine=0 iteration=10 point=forward microbatch=1",
    ]
    run = grown(tmp_path, monkeypatch, faults)
    assert not given_up(run), run.output[-5000:]
    assert stages_of(run) == [[1, 2], [1, 1], [1, 2], []]
    assert [len(state.worlds.full.machines) for state in worlds_of(run) if state.worlds.full] == [4, 4, 4]
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
def test_merged_pipelines_part_again(
    tmp_path: Path, undisturbed: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline needs two machines. Of three there is one, and of four there are two."""
    fault = "kill machine=2 iteration=5 point=backward microbatch=2"
    run = grown(tmp_path, monkeypatch, [fault], args=["--min-stages=2"])
    assert not given_up(run), run.output[-5000:]
    assert stages_of(run) == [[3], []]
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("second", "sizes"),
    [
        ("kill worker=3 iteration=any point=prepared", [3, 4]),
        ("kill worker=3 iteration=any point=take", [3, 4]),
        ("kill machine=3 iteration=any point=take", [3]),
    ],
)
def test_a_loss_while_it_grows(
    second: str, sizes: list[int], tmp_path: Path, undisturbed: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again where a next worker ends. Where a machine is lost, the one that came replaces it.

    Only the larger world has a worker 3.
    """
    first = "kill machine=1 iteration=5 point=forward microbatch=1"
    run = grown(tmp_path, monkeypatch, [first], then=second)
    assert len(given_up(run)) == 1
    assert [state.world_size for state in worlds_of(run)] == sizes
    assert not guests_of(run)
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
def test_with_a_policy_that_advises_it_stays_small(
    tmp_path: Path, undisturbed: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says once which change would make the loss good."""
    fault = "kill machine=1 iteration=5 point=forward microbatch=1"
    log = tmp_path / "log.jsonl"
    run = grown(tmp_path, monkeypatch, [fault], "--policy", "advise", "--events-log", str(log))
    assert [state.world_size for state in worlds_of(run)] == [3]
    lines = map(json.loads, log.read_text().splitlines())
    (advised,) = (line["fields"] for line in lines if line["event"] == "change_advised")
    assert (advised["kind"], advised["machines"]) == ("return", 4)
    assert_same_state(run, undisturbed)


@pytest.mark.thorough
def test_a_policy_grows_it_within_its_limits(
    tmp_path: Path, undisturbed: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = "kill machine=1 iteration=5 point=forward microbatch=1"
    run = grown(tmp_path, monkeypatch, [fault], "--policy", "auto")
    assert [state.world_size for state in worlds_of(run)] == [3, 4]
    assert asked_by(run) == ["--on-loss shrink", "--policy auto"]
    assert_same_state(run, undisturbed)


def late(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, *example: str, machines: int, fewer: int
) -> ClusterRun:
    """A run of an example that a loss makes smaller, and in which another machine comes."""
    monkeypatch.setenv("PYTHONPATH", str((EXAMPLES / example[0]).parent), prepend=":")
    for name, value in (("EXAMPLE", Path(example[0]).name), ("QUICK", "1000"), ("LOST", "1")):
        monkeypatch.setenv(name, value)
    script = [str(SLOW_UNTIL_TOLD), *arguments(folder, *example, iterations=ITERATIONS)]
    run = run_launcher(LATE, folder, inject=fault, machines=machines, flags=SHRINK, script=script)
    assert len(run.events("FaultInjected")) == 1, "the fault did not strike"
    assert not given_up(run), run.output[-5000:]
    assert [state.world_size for state in worlds_of(run)] == [fewer, machines]
    return run


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("example", "fault", "machines", "fewer", "spares"),
    [
        pytest.param(HSDP, "kill machine=1 iteration=5 point=between", 4, 2, 1, id="shards"),
        pytest.param((REPLICAS,), "kill machine=1 iteration=8 point=optimizer", 2, 1, 0, id="replicas"),
        pytest.param(FSDP, "kill machine=1 iteration=8 point=optimizer", 3, 2, 0, id="copies"),
    ],
)
def test_it_is_as_if_it_had_been_resumed(
    example: tuple[str, ...],
    fault: str,
    machines: int,
    fewer: int,
    spares: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All files are those of a run that was resumed with fewer workers, and with all of them.

    Of two replicas of two shards one is left, and a machine waits until another one comes.
    """
    run = late(tmp_path / "late", monkeypatch, fault, *example, machines=machines, fewer=fewer)
    few, all_again = worlds_of(run)
    assert len(few.membership.spares) == spares
    since, until, again = few.worlds.present.since, all_again.worlds.present.since, tmp_path / "again"
    for count, iterations in ((machines, since), (fewer, until), (machines, ITERATIONS)):
        for left in [*again.glob("weights/*"), *again.glob("out/*")]:
            left.unlink()
        flags = ["--resume"] if iterations > since else []
        every = "--checkpoint-every=1"
        resumed = train_anew(again, *example, every, machines=count, iterations=iterations, flags=flags)
    if example == (REPLICAS,):
        assert_same_files(run, resumed)
    else:
        assert_identical(run, resumed)


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["reduced", "reduce"])
def test_three_replicas_are_three_again(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample is trained on once, in its place, and all replicas are equal.

    They use the buckets of before the loss at once, which a resumed run makes in its second iteration: with
    three replicas, sums differ in their last bits.
    """
    samples, folder = tmp_path / "samples", tmp_path / "run"
    fault = f"kill machine=0 iteration=5 point={point}"
    args = (REPLICAS, f"--samples={samples}")
    run = late(folder, monkeypatch, fault, *args, machines=3, fewer=2)
    undisturbed = tmp_path / "undisturbed"
    of_undisturbed = undisturbed / "samples"
    train_anew(
        undisturbed, REPLICAS, f"--samples={of_undisturbed}", machines=3, iterations=ITERATIONS, flags=[]
    )
    assert samples_by_iteration(samples) == samples_by_iteration(of_undisturbed)
    first, *others = [torch.load(path, weights_only=True) for path in sorted(folder.glob("out/rank*.pt"))]
    assert len(others) == 2
    for other in others:
        assert all(torch.equal(first["model"][name], other["model"][name]) for name in first["model"])
    assert asked_by(run) == ["--on-loss shrink"] * 2
