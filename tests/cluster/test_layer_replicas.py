"""Pipelines of a LayerStack that are replicas of each other, with cuts that differ once machines are lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swift_ft.data import samples_by_iteration
from tests.cluster.test_layouts import ALONE, DROPOUT, EVEN
from tests.support.cluster import (
    EXAMPLES,
    SLOW_UNTIL_TOLD,
    ClusterRun,
    assert_clean,
    assert_struck_in_turn,
    once,
    one_line,
    run_cluster,
    training,
)
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

ELASTIC = EXAMPLES / "train_elastic.py"
TWO = (*DROPOUT, "--pipelines", "2")
LONG = 18
MICROBATCHES = 16  # of both pipelines
UNTIL_TOLD = 60

References = Callable[..., ClusterRun]


def run_pipelines(
    folder: Path,
    *args: str,
    inject: str = "",
    machines: int = 4,
    spares: int = 0,
    iterations: int = LONG,
    again: bool = False,
) -> ClusterRun:
    """With so many spares. Without any, machines that are left run the workers of lost ones, too."""
    flags = ["--spares", str(spares)] if spares else [*ALONE]
    whole = training(folder, EVEN, iterations=iterations)
    chosen = args or TWO
    return run_cluster(
        folder, *chosen, inject=inject, machines=machines, flags=[*flags, *["--resume"] * again], script=whole
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Runs that nothing disturbs, by their arguments."""
    return once(tmp_path_factory, run_pipelines)


def at_end(run: ClusterRun) -> list[dict[str, torch.Tensor]]:
    """The weights of each worker, and what a script keeps beside them."""
    return [torch.load(path, weights_only=True) for path in sorted((run.folder / "weights").glob("rank*.pt"))]


def assert_same_layers(run: ClusterRun, reference: ClusterRun, pipelines: int = 2) -> None:
    """Each pipeline has each layer, with the bits of the undisturbed run."""
    assert run.code == 0, run.output[-6000:]
    expected = {name: tensor for own in at_end(reference) for name, tensor in own.items()}
    found = at_end(run)
    differ = [
        name for own in found for name, tensor in own.items() if not torch.equal(tensor, expected[name])
    ]
    assert not differ
    assert Counter(name for own in found for name in own) == dict.fromkeys(expected, pipelines)


def modes(run: ClusterRun) -> set[str]:
    return {recovery["mode"] for recovery in run.recoveries}


# ---------------------------------------------------------------------------------- shares of microbatches


def run_shared(
    folder: Path, *args: str, inject: str = "", exact: bool = True, machines: int = 6
) -> ClusterRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OF", "shared_batches")
        patch.setenv("OWN_MICROBATCHES", "1")
        patch.setenv("SAMPLE_LOG", str(folder / "samples"))
        chosen = (*DROPOUT, "--plan-at=11", "--exact" if exact else "--no-exact", *args)
        return run_pipelines(folder, *chosen, inject=inject, machines=machines, iterations=24)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return run_shared(tmp_path_factory.mktemp("exact"))


def shares(run: ClusterRun) -> list[list[int]]:
    return [event["shares"] for event in run.report["events"] if event["event"] == "SharesRequested"]


DONE = re.compile(r"iteration (\d+) of pipeline (\d): (\d+) microbatches, losses add up to (\S+)")


def done_by_pipelines(run: ClusterRun) -> dict[int, dict[int, tuple[int, float]]]:
    """By iteration and pipeline, its microbatches and the sum of their losses, as it was done last."""
    found: dict[int, dict[int, tuple[int, float]]] = {}
    for iteration, pipeline, count, losses in DONE.findall(run.output):
        found.setdefault(int(iteration), {})[int(pipeline)] = int(count), float(losses)
    return found


def loss_of(iteration: dict[int, tuple[int, float]]) -> float:
    """Of its global batch."""
    counts, losses = zip(*iteration.values(), strict=True)
    assert sum(counts) == MICROBATCHES
    return float(sum(losses)) / MICROBATCHES


def test_microbatches_go_to_the_other_pipeline_before_layers_move(tmp_path: Path, exact: ClusterRun) -> None:
    """And with exact=True not one bit depends on it, nor on any cut."""
    losses = "kill machine=4 iteration=3 point=reducing; kill machine=1 iteration=12 point=forward"
    run = run_shared(tmp_path, inject=losses)
    assert_same_layers(run, exact)
    assert modes(run) == {"replica"}, run.output[-3000:]
    first, *_ = shares(run)
    assert first[0] > first[1]
    assert sum(first) == 32  # samples
    lines = [
        line for line in run.output.splitlines() if "samples of each batch" in line or "layers move" in line
    ]
    assert "samples of each batch" in lines[0], lines
    assert any("layers move" in line for line in lines), lines
    assert samples_by_iteration(tmp_path / "samples") == samples_by_iteration(exact.folder / "samples")
    shared, moved = run.events("SharesRequested")[0]["iteration"], run.report["layouts"][0]["iteration"]
    assert shared < moved
    done = done_by_pipelines(run)
    assert [done[shared - 1][pipeline][0] for pipeline in (0, 1)] == [8, 8]
    for iteration in range(shared, moved):  # the re-cut has not come yet, and the other pipeline helps
        assert [2 * done[iteration][pipeline][0] for pipeline in (0, 1)] == first, iteration
    for part in (exact.folder / "samples").iterdir():  # one worker of each pipeline writes them down
        assert part.read_text().count('"iteration": 7,') == 1


@pytest.mark.thorough
def test_without_the_tree_sums_are_rounded_otherwise(tmp_path: Path, exact: ClusterRun) -> None:
    """And microbatches go where session.plan() has said before."""
    reference = run_shared(tmp_path / "undisturbed", exact=False)
    run = run_shared(tmp_path / "lost", inject="kill machine=4 iteration=13 point=reducing", exact=False)
    assert run.code == 0, run.output[-3000:]
    plan = json.loads((tmp_path / "lost" / "weights" / "plan.json").read_text())["machines"][4]
    assert [2 * count for count in plan["rerouted"]] == shares(run)[0]
    assert max(plan["rerouted_s"], plan["shared_s"]) < plan["hosted_s"]
    first, then = done_by_pipelines(reference), done_by_pipelines(run)
    assert first.keys() == then.keys() == {*range(24)}
    for iteration, done in then.items():
        assert loss_of(done) == pytest.approx(loss_of(first[iteration]), abs=1e-5), iteration
    expected = {name: tensor for own in at_end(reference) for name, tensor in own.items()}
    for own in at_end(run):
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)
    assert_same_layers(run, run)  # copies are equal, to the bit
    assert exact.code == 0


@pytest.mark.thorough
def test_a_schedule_that_forces_equal_shares(tmp_path: Path) -> None:
    """That is said, and layers move all the same."""
    chosen = ("--schedule", "Interleaved1F1B")
    lost = "kill machine=1 iteration=3 point=reducing"
    run = run_shared(tmp_path / "lost", *chosen, inject=lost, exact=False, machines=4)
    assert "All pipelines keep equally many microbatches: the order of this schedule is for" in run.output
    assert_same_layers(run, run_shared(tmp_path / "undisturbed", *chosen, exact=False, machines=4))
    assert shares(run) == []
    assert run.report["layouts"]


POINTS = [
    "point=forward microbatch=2",
    "point=backward microbatch=0",
    "point=backward microbatch=3",
    "point=reduce",
    "point=reducing",
    "point=reduced",
    "point=optimizer",
    "point=between",
]
"""Before, while and after the gradients of single layers are averaged."""


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("point", POINTS)
def test_a_loss_anywhere(point: str, victim: int, tmp_path: Path, undisturbed: References) -> None:
    """The lost stage's layers come from the other pipeline. Nothing is replayed for it, no file is loaded."""
    chosen = (*TWO, "--exact") if victim % 2 else TWO
    run = run_pipelines(tmp_path, *chosen, inject=f"kill machine={victim} iteration=5 {point}", spares=1)
    assert_same_layers(run, undisturbed(*chosen))
    assert_clean(run)
    assert modes(run) == {"replica"}, run.output[-3000:]
    # Who is between two steps has completed one that another worker may still have to complete, alone.
    behind = {1} if point == "point=between" else set()
    assert {*run.recoveries[0]["replayed_iterations"].values()} <= behind


@pytest.mark.parametrize("layer", [0, 4, 5, 9])
@pytest.mark.parametrize("point", ["reduce", "reducing", "reduced"])
def test_a_loss_while_single_layers_are_averaged(
    point: str, layer: int, tmp_path: Path, undisturbed: References
) -> None:
    victim = 1 if layer > 4 else 2
    inject = f"kill machine={victim} iteration=5 point={point} bucket={layer}"
    run = run_pipelines(tmp_path, inject=inject, spares=1)
    assert_same_layers(run, undisturbed())
    assert modes(run) == {"replica"}, run.output[-3000:]


def test_a_worker_that_is_behind_completes_the_iteration_alone(
    tmp_path: Path, undisturbed: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others have updated, and nobody else has its layers: it has their averages, and needs no more."""
    monkeypatch.setenv("OF", "falls_behind")
    run = run_pipelines(tmp_path, spares=1)
    monkeypatch.delenv("OF")
    assert_same_layers(run, undisturbed())
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replica", run.output[-3000:]
    assert recovery["resume"] == 6
    assert recovery["replayed_iterations"] == {"3": 1}
    assert recovery["undone"] == {}


def test_two_are_lost_at_once_and_no_layer_with_them(tmp_path: Path, undisturbed: References) -> None:
    """The first stage of one pipeline, and the last one of the other."""
    both = "; ".join(f"kill machine={machine} iteration=5 point=reducing" for machine in (0, 3))
    run = run_pipelines(tmp_path, inject=both, spares=2)
    assert_same_layers(run, undisturbed())
    assert modes(run) == {"replica"}, run.output[-3000:]


def test_all_replicas_of_a_layer_are_lost(tmp_path: Path, undisturbed: References) -> None:
    """The second one before the first one is repaired. Then all go back to the checkpoint."""
    both = "kill machine=3 iteration=9 point=forward; kill machine=1 iteration=any point=report"
    run = run_pipelines(tmp_path, inject=both, spares=2)
    assert_same_layers(run, undisturbed())
    assert modes(run) == {"fallback"}, run.output[-3000:]
    assert "no pipeline has a whole state of layers 5, 6, 7, 8, 9" in run.output


@pytest.mark.parametrize(
    "second",
    [
        "worker=1 iteration=any point=report",
        "machine=3 iteration=any point=transfer",
        "machine=2 iteration=any point=leave",
        "machine=2 iteration=any point=join",
        "machine=0 iteration=any point=join",
    ],
)
def test_a_loss_while_the_first_one_is_repaired(second: str, tmp_path: Path, undisturbed: References) -> None:
    first = "kill machine=1 iteration=5 point=optimizer"
    run = run_pipelines(tmp_path, inject=f"{first}; kill {second}", spares=2)
    assert_same_layers(run, undisturbed())
    assert_struck_in_turn(run, first, f"kill {second}")


def test_three_and_three_then_three_and_two_then_two_and_two(tmp_path: Path, undisturbed: References) -> None:
    """Each loss makes a pipeline's cut another one, and the layers' copies are where the cut put them."""
    losses = [
        "kill machine=4 iteration=3 point=reducing",
        "kill machine=1 iteration=9 point=backward microbatch=1",
        "kill machine=5 iteration=14 point=optimizer",
    ]
    run = run_pipelines(tmp_path, inject="; ".join(losses), machines=6, iterations=22)
    assert_same_layers(run, undisturbed(machines=6, iterations=22))
    assert modes(run) == {"replica"}, run.output[-3000:]
    assert len(run.recoveries) == 3
    first, second, *_ = (change["layers"] for change in run.report["layouts"])
    assert first[:3] == [3, 3, 4]
    assert sorted(first[3:]) != [3, 3, 4]
    assert first[3:] == second[3:]
    assert first[:3] != second[:3]


def test_the_guest_of_a_lost_machine_is_in_its_pipeline(tmp_path: Path, undisturbed: References) -> None:
    """So no machine has two copies of a layer: any other one may be lost then."""
    losses = "kill machine=4 iteration=3 point=forward; kill machine=3 iteration=12 point=forward"
    run = run_pipelines(tmp_path, inject=losses, machines=6)
    assert_same_layers(run, undisturbed(machines=6))
    assert modes(run) == {"replica"}, run.output[-3000:]
    assert "machine 3 runs the workers of machine 4, too" in run.output


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_schedules(schedule: str, exact: bool, tmp_path: Path, undisturbed: References) -> None:
    chosen = (*TWO, "--schedule", schedule, *["--exact"] * exact)
    run = run_pipelines(tmp_path, *chosen, inject="kill machine=1 iteration=5 point=reducing")
    assert_same_layers(run, undisturbed(*chosen))
    assert modes(run) == {"replica"}, run.output[-3000:]


@pytest.mark.thorough
def test_three_pipelines(tmp_path: Path, undisturbed: References) -> None:
    """Any two machines may be lost at once."""
    three = (*DROPOUT, "--pipelines", "3")
    both = "; ".join(f"kill machine={machine} iteration=5 point=reduced" for machine in (1, 3))
    run = run_pipelines(tmp_path, *three, inject=both, machines=6)
    assert_same_layers(run, undisturbed(*three, machines=6), pipelines=3)
    assert modes(run) == {"replica"}, run.output[-3000:]


@pytest.mark.parametrize(
    "habits",
    [
        "average,halves at 3",
        "epochs,halves at 3,clip",
        "frozen,scales at 3",
        "layer rates",
        *(
            pytest.param(habits, marks=pytest.mark.thorough)
            for habits in (
                "thaws at 3",
                "eval at 3,epochs",
                "groups,scaler",
                "muon",
                "lamb,clip",
                "sgd,average",
                "average,clip,groups",
                "wrapped,clip",
            )
        ),
    ],
)
def test_habits(habits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost worker's layers, and all else that its script has changed, come from the other pipeline."""
    for name, value in {"OF": "layers", "PIPELINES": "2", "HABITS": habits}.items():
        monkeypatch.setenv(name, value)
    reference = run_pipelines(tmp_path / "undisturbed", *DROPOUT, iterations=12)
    lost = "kill machine=1 iteration=6 point=forward"
    run = run_pipelines(tmp_path / "lost", *DROPOUT, inject=lost, spares=1, iterations=12)
    assert_same_layers(run, reference)
    assert modes(run) == {"replica"}, run.output[-3000:]


def test_what_each_pipeline_has_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In layers, too: as the lost worker noted it in the last checkpoint. Buffers are named."""
    for name, value in {"OF": "layers", "PIPELINES": "2", "HABITS": "loads"}.items():
        monkeypatch.setenv(name, value)
    reference = run_pipelines(tmp_path / "undisturbed", *DROPOUT, iterations=9)
    lost = "kill machine=1 iteration=6 point=forward committed=6"
    run = run_pipelines(tmp_path / "lost", *DROPOUT, inject=lost, spares=1, iterations=9)
    assert run.code == 0, run.output[-6000:]
    assert modes(run) == {"replica"}, run.output[-3000:]
    for rank, (ours, theirs) in enumerate(zip(at_end(run), at_end(reference), strict=True)):
        unlike = {name.partition(".")[2] for name, one in theirs.items() if not one.equal(ours[name])}
        assert unlike == ({"load"} if rank == 1 else set())
    assert re.search(r"each pipeline has model\.\d\.load.* for itself: this worker goes on with", run.output)
    assert re.search(r"each replica has .*model\.\d\.seen.* this worker keeps its own, as it was", run.output)


def test_resumed_after_cuts_have_become_unlike(tmp_path: Path, undisturbed: References) -> None:
    lost, stops = "kill machine=2 iteration=3 point=forward", "raise worker=0 iteration=14 point=forward"
    first = run_pipelines(tmp_path, inject=f"{lost}; {stops}", machines=6)
    assert first.code == 1, first.output[-3000:]
    assert len(first.report["layouts"]) == 1
    run = run_pipelines(tmp_path, machines=6, again=True)
    assert_same_layers(run, undisturbed(machines=6))


def test_a_machine_comes_and_cuts_are_alike_again(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.script = [*training(hosts.folder, SLOW_UNTIL_TOLD, iterations=UNTIL_TOLD), *TWO]
    monkeypatch.setenv("EXAMPLE", "even_layers")
    monkeypatch.setenv("QUICK", str(UNTIL_TOLD // 2))
    flags = ["--nnodes", "4", "--elastic-wait", "0.2"]
    for node, name in enumerate(("first", "second", "third", "fourth")):
        hosts.start(name, node, *flags)
    hosts.wait_for("iteration 6:", "second")
    third = hosts.processes.pop("third")
    third.kill()
    third.wait()
    hosts.wait_for("machine 3 runs the workers of machine 2, too", "first")
    hosts.wait_for("iteration 16:", "fourth")
    hosts.start("fifth", 2, *flags)
    hosts.wait_for("machine 2 leaves: it was a guest", "first")
    (hosts.folder / "go").touch()
    assert hosts.end() == {"first": 0, "second": 0, "fourth": 0, "fifth": 0}
    whole = training(tmp_path, EVEN, iterations=UNTIL_TOLD)
    reference = run_cluster(tmp_path, *TWO, machines=4, script=whole)
    assert_same_layers(ClusterRun(hosts.folder, 0, "", {}), reference)


def test_workers_that_cannot_form_the_pipelines(tmp_path: Path) -> None:
    run = run_pipelines(tmp_path, machines=3)
    assert run.code == 2
    assert "3 workers cannot form 2 pipelines with as many stages each" in one_line(run)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"TOLERATE": "1", "WORKERS": "2"},
            "copies of layer 0 are on 1 machine, and tolerate=1 wants one more",
        ),
        ({"PIPELINES": "2", "TOLERATE": "2"}, "2 pipelines have 2 copies of each layer, which 2 losses"),
        ({"PIPELINES": "0"}, "give one pipeline or more"),
        ({"PIPELINES": "2", "NORM": "batch"}, "is a BatchNorm1d: each pipeline would have statistics of its"),
        ({"PIPELINES": "2", "NORM": "lazy"}, "is a LazyBatchNorm1d: each pipeline would have statistics"),
        ({"PIPELINES": "2", "NORM": "instance"}, "is a InstanceNorm1d: each pipeline would have statistics"),
        ({"PIPELINES": "2", "PARTS": "in place"}, "Compile each layer of a LayerStack by itself"),
        ({"PIPELINES": "2", "PARTS": "wrapped"}, "The LayerStack is inside of another module"),
        ({"PIPELINES": "2", "UNATTACHED": "1"}, "would each train a model of their own"),
        ({"ALONE": "1"}, "A LayerStack has all workers"),  # as where others have shards of its stages
        ({"PIPELINES": "2", "SHARDED": "1"}, "A layer of the LayerStack is sharded"),
        ({"PIPELINES": "2", "WRAPPED": "1"}, "A layer of the LayerStack is wrapped by DDP"),
        ({"PIPELINES": "2", "TWICE": "1"}, "so it is called once in a step"),
    ],
)
def test_what_cannot_be(
    settings: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    script = training(tmp_path, Path(__file__).parent / "scripts" / "unlike_pipelines.py", iterations=3)
    workers = settings.get("WORKERS", "1")
    flags = ["--nproc-per-node", workers]
    run = run_cluster(tmp_path, machines=2 // int(workers), flags=flags, script=script)
    assert run.code == 2, run.output[-3000:]
    assert why in one_line(run)


def test_resumed_with_another_number_of_pipelines(tmp_path: Path) -> None:
    """Each would get another part of the batches, where the session does not deal them."""
    first = run_pipelines(tmp_path, inject="raise worker=0 iteration=7 point=forward")
    assert first.code == 1, first.output[-3000:]
    run = run_pipelines(tmp_path, *DROPOUT, again=True)
    assert run.code == 2, run.output[-3000:]
    assert "pipelines 2 there, 1 here" in one_line(run)


@pytest.mark.thorough
@pytest.mark.parametrize("exact", [False, True])
def test_three_and_three_then_two_and_two_then_three_and_three(
    exact: bool, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pipeline loses a machine, and two others come."""
    chosen = (*TWO, *["--exact"] * exact)
    hosts.script = [*training(hosts.folder, SLOW_UNTIL_TOLD, iterations=4 * UNTIL_TOLD), *chosen]
    monkeypatch.setenv("EXAMPLE", "even_layers")
    monkeypatch.setenv("QUICK", str(4 * UNTIL_TOLD))
    flags = ["--nnodes", "4:6", "--elastic-wait", "0.2"]
    names = [f"machine{node}" for node in range(6)]
    for node, name in enumerate(names):
        hosts.start(name, node, *flags)
    hosts.wait_for("iteration 6:", names[2])

    def wait_for_layouts(count: int) -> None:
        found = "layers move after"
        wait_until(lambda: hosts.output(names[0]).count(found) >= count, f"{count} layouts", 120)

    for lost, layouts in ((4, 1), (1, 2)):
        process = hosts.processes.pop(names[lost])
        process.kill()
        process.wait()
        wait_for_layouts(layouts)
    hosts.start("seventh", 4, *flags)
    hosts.start("eighth", 1, *flags)
    wait_until(lambda: hosts.output(names[0]).count("leaves: it was a guest") >= 2, "the guests left", 120)
    (hosts.folder / "go").touch()
    ended = hosts.end()
    assert set(ended.values()) == {0}, ended
    whole = training(tmp_path, EVEN, iterations=4 * UNTIL_TOLD)
    reference = run_cluster(tmp_path, *chosen, machines=6, script=whole)
    assert_same_layers(ClusterRun(hosts.folder, 0, "", {}), reference)
