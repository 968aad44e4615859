"""Layers move between machines when one is lost or comes, and not one bit of the result changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpt import Config, build_layer

from swift_ft.checkpoint.manifest import MANIFEST
from swift_ft.offline.part_comparison import read_part
from swift_ft.recovery.job_state import SavedPart
from swift_ft.storage.store import Store
from tests.support.cluster import (
    SLOW_UNTIL_TOLD,
    SMALL,
    ClusterRun,
    assert_clean,
    assert_same_layers,
    assert_struck_in_turn,
    once,
    one_line,
    over_backend,
    recover,
    run_cluster,
    training,
)
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

EVEN = Path(__file__).parent / "scripts" / "even_layers.py"
"""The same, or another script (OF), where all layers count as equally expensive."""
DEAR = EVEN.with_name("dear_layers.py")
"""The same, where the two last layers are dearer than all others together."""
LAYERS = 10
DROPOUT = ("--dropout", "0.2")
ALONE = ["--spares", "0", "--no-replacement", "--elastic-wait", "0"]
LONG = 18
MEASURED = 24
"""Iterations: the layers' costs are measured in five, and a change comes two after that."""
UNTIL_TOLD = 60
"""Iterations. The second half lasts until a test says go."""
LOST = "kill machine=1 iteration=4 point=forward microbatch=3"

References = Callable[..., ClusterRun]


def run_layers(
    folder: Path,
    *args: str,
    inject: str = "",
    machines: int = 3,
    script: Path = EVEN,
    iterations: int = LONG,
    again: bool = False,
) -> ClusterRun:
    """Machines without spares, in whose place no other one is started."""
    flags = [*ALONE, *["--resume"] * again]
    whole = training(folder, script, iterations=iterations)
    return run_cluster(folder, *args, inject=inject, machines=machines, flags=flags, script=whole)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Runs that nothing disturbs, by their arguments."""

    def run(folder: Path, *args: str, of: str = "train_elastic", iterations: int = LONG) -> ClusterRun:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OF", of)
            return run_layers(folder, *args, iterations=iterations)

    return once(tmp_path_factory, run)


def layers_of(run: ClusterRun) -> list[set[int]]:
    """The layers of each worker at the end."""
    at_end = [
        torch.load(path, weights_only=True) for path in sorted((run.folder / "weights").glob("rank*.pt"))
    ]
    return [{int(name.partition(".")[0]) for name in own if name[0].isdigit()} for own in at_end]


def moves(run: ClusterRun) -> int:
    """How often the layers have moved."""
    return run.output.count("layers move after iteration")


def test_a_lost_machine_s_layers_are_shared_by_all(tmp_path: Path, undisturbed: References) -> None:
    """Its host has two of the stages, and as many layers as the other machine, as far as that goes."""
    run = run_layers(tmp_path, *DROPOUT, inject=LOST)
    assert_same_layers(run, undisturbed(*DROPOUT))
    assert_clean(run)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"], run.output[-3000:]
    first, second, third = layers_of(run)
    assert len(first) + len(second) == len(third) == 5
    (change,) = run.report["layouts"]
    assert [len(first), len(second), len(third)] == change["layers"]
    moved = {layer for move in change["moves"] for layer in move["layers"]}
    assert sum(change["received"].values()) == sum(map(state_bytes, moved))


def state_bytes(number: int) -> int:
    """A layer's parameters, two moments of each, and a step counter."""
    sizes = {name: int(value) for name, value in (flag[2:].split("=") for flag in SMALL)}
    config = Config(
        layers=sizes["layers"], width=sizes["width"], heads=sizes["heads"], sequence=sizes["sequence"]
    )
    return sum(3 * p.nbytes + 4 for p in build_layer(number, config).parameters())


def test_by_what_layers_were_measured_to_cost(tmp_path: Path, undisturbed: References) -> None:
    """The last machine keeps one of the two dear layers; of equally dear ones it would have half of all."""
    run = run_layers(tmp_path, *DROPOUT, inject=LOST, script=DEAR, iterations=MEASURED)
    assert_same_layers(run, undisturbed(*DROPOUT, iterations=MEASURED))
    (change,) = run.report["layouts"]
    assert [len(layers) for layers in layers_of(run)] == change["layers"]
    assert sum(change["layers"]) == LAYERS
    assert change["layers"][2] == 1, run.output[-3000:]


def test_a_run_begins_with_what_the_run_before_has_measured(tmp_path: Path, undisturbed: References) -> None:
    """Each dear layer is alone from the first iteration on, also on a machine that takes another's place."""
    args = (*DROPOUT, "--costs", "earlier")
    stopped = "raise worker=0 iteration=13 point=forward"
    first = run_layers(tmp_path, *args, machines=2, inject=stopped, script=DEAR, iterations=MEASURED)
    assert first.code == 1, first.output[-3000:]
    run = run_cluster(
        tmp_path,
        *args,
        machines=3,
        inject="kill machine=1 iteration=15 point=backward",
        flags=["--resume"],
        script=training(tmp_path, DEAR, iterations=MEASURED),
    )
    assert_same_layers(run, undisturbed(*DROPOUT, iterations=MEASURED))
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"], run.output[-3000:]
    assert [len(layers) for layers in layers_of(run)] == [8, 1, 1]
    assert not run.report["layouts"], "the layers have moved"


def test_four_then_three_then_two_then_one(tmp_path: Path, undisturbed: References) -> None:
    losses = [
        "kill machine=0 iteration=3 point=backward microbatch=1",
        "kill machine=3 iteration=6 point=optimizer",
        "kill machine=1 iteration=12 point=forward",
    ]
    run = run_layers(tmp_path, *DROPOUT, inject="; ".join(losses), machines=4)
    assert_same_layers(run, undisturbed(*DROPOUT))
    assert len(run.recoveries) == 3, run.output[-3000:]


@pytest.mark.parametrize(
    "schedule",
    ["ZBVZeroBubble", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "DualPipeV"],
)
def test_schedules(schedule: str, tmp_path: Path, undisturbed: References) -> None:
    chosen = (*DROPOUT, "--schedule", schedule)
    run = run_layers(tmp_path, *chosen, inject=LOST)
    assert_same_layers(run, undisturbed(*chosen))
    assert moves(run) == 1, run.output[-3000:]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_machine_is_lost_while_layers_move(rank: int, tmp_path: Path, undisturbed: References) -> None:
    """Nothing has changed then, and the layers move later."""
    run = run_layers(tmp_path, *DROPOUT, inject=f"{LOST}; kill worker={rank} iteration=any point=move")
    assert_same_layers(run, undisturbed(*DROPOUT))
    assert "point=move" in run.output, run.output[-3000:]
    assert {recovery["mode"] for recovery in run.recoveries} == {"replay"}, run.output[-3000:]
    assert len(run.recoveries) > 1, run.output[-3000:]


@pytest.mark.parametrize(
    "second",
    [
        "worker=1 iteration=any point=load",
        "worker=1 iteration=any point=replay",
        "machine=0 iteration=any point=leave",
        "machine=2 iteration=any point=leave",
        "machine=0 iteration=any point=join",
        "machine=2 iteration=any point=join",
    ],
)
def test_a_machine_is_lost_while_the_first_loss_is_repaired(
    second: str, tmp_path: Path, undisturbed: References
) -> None:
    """The guest, before it has the lost stage's state or while it replays; its host; and another machine.

    One machine is left then, to which no layer has to move.
    """
    run = run_layers(tmp_path, *DROPOUT, inject=f"{LOST}; kill {second}")
    assert_same_layers(run, undisturbed(*DROPOUT))
    assert_struck_in_turn(run, LOST, f"kill {second}")
    assert (moves(run) >= 1) == second.startswith("worker"), run.output[-3000:]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_machine_is_lost_right_after_layers_moved(
    rank: int, tmp_path: Path, undisturbed: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new layout may have no checkpoint yet: then all load their layers from one of the old layout."""
    reference = undisturbed(of="layers")
    monkeypatch.setenv("OF", "layers")
    monkeypatch.setenv("DIES", str(rank))
    run = run_layers(tmp_path, inject=LOST)
    assert_same_layers(run, reference)
    assert (tmp_path / "died").exists()
    assert len(run.recoveries) > 1, run.output[-3000:]
    assert {recovery["mode"] for recovery in run.recoveries} <= {"replay", "fallback"}, run.output[-3000:]


@pytest.mark.parametrize(
    "habits",
    [
        "tied,clip",
        "groups,scaler",
        "muon",
        "lamb,clip",
        "sgd,average",
        "average,clip,groups",
        "wrapped,clip",
        "twice",
        "frozen,thaws at 3",
        "scales at 3,eval at 3",
    ],
)
def test_habits(habits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF", "layers")
    monkeypatch.setenv("HABITS", habits)
    reference = run_layers(tmp_path / "undisturbed", *DROPOUT)
    run = run_layers(tmp_path / "lost", *DROPOUT, inject=LOST)
    assert_same_layers(run, reference)
    assert moves(run) == 1, run.output[-3000:]


def test_layers_with_rates_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker has a group with the options of a layer that was on another one: the layers stay."""
    monkeypatch.setenv("OF", "layers")
    monkeypatch.setenv("HABITS", "layer rates")
    reference = run_layers(tmp_path / "undisturbed")
    run = run_layers(tmp_path / "lost", inject=LOST)
    assert_same_layers(run, reference)
    assert "in a group whose lr is" in run.output, run.output[-3000:]
    assert [len(layers) for layers in layers_of(run)] == [3, 3, 4], run.output[-3000:]


@pytest.mark.parametrize("habits", ["thaws at 3", "scales at 3,eval at 3", "layer rates,no scheduler"])
def test_habits_at_a_resume(habits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another number of machines."""
    monkeypatch.setenv("OF", "layers")
    monkeypatch.setenv("HABITS", habits)
    reference = run_layers(tmp_path / "undisturbed", *DROPOUT)
    folder = tmp_path / "resumed"
    first = run_layers(folder, *DROPOUT, inject="raise worker=0 iteration=13 point=forward")
    assert first.code == 1, first.output[-3000:]
    run = run_layers(folder, *DROPOUT, machines=2, again=True)
    assert_same_layers(run, reference)


def test_rates_of_a_scheduler_that_has_other_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state has a rate for each group, and groups of other layers would get them."""
    monkeypatch.setenv("OF", "layers")
    monkeypatch.setenv("HABITS", "layer rates")
    first = run_layers(tmp_path, inject="raise worker=0 iteration=5 point=forward")
    assert first.code == 1, first.output[-3000:]
    run = run_layers(tmp_path, machines=2, again=True)
    assert run.code != 0
    assert "its scheduler has a rate for each of them" in one_line(run), run.output[-3000:]


@pytest.mark.parametrize("machines", [2, 5])
def test_resume_with_another_number_of_machines(
    machines: int, tmp_path: Path, undisturbed: References
) -> None:
    stopped = "raise worker=0 iteration=13 point=forward"
    first = run_layers(tmp_path, *DROPOUT, inject=f"{LOST}; {stopped}")
    assert first.code == 1, first.output[-3000:]
    run = run_layers(tmp_path, *DROPOUT, machines=machines, again=True)
    assert_same_layers(run, undisturbed(*DROPOUT))
    assert len(layers_of(run)) == machines


def test_layers_are_read_from_the_nearest_disk_that_has_them(
    tmp_path: Path, undisturbed: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three machines two are left: each has its own layers, and the third one's are in the store only."""
    monkeypatch.setenv("OF", "layers")
    monkeypatch.setenv("LOCAL", str(tmp_path / "disks"))
    first = run_layers(tmp_path, inject="raise worker=0 iteration=13 point=forward")
    assert first.code == 1, first.output[-3000:]
    newest = max(marker.parent for marker in (tmp_path / "store" / "checkpoints").glob("*/committed.json"))
    sizes = [
        {file.name: file.stat().st_size for file in part.iterdir() if file.name != MANIFEST}
        for part in sorted(newest.glob("rank-*"))
    ]
    run = run_layers(tmp_path, machines=2, again=True)
    assert_same_layers(run, undisturbed(of="layers"))
    assert [len(layers) for layers in layers_of(run)] == [5, 5]
    (load,) = run.report["loads"]
    goes, stays = sizes[1]["__0_4.distcp"] + sizes[1]["__0_5.distcp"], sizes[1]["__0_6.distcp"]
    of_first, of_second, of_third = (sum(part.values()) for part in sizes)
    assert load["own_disk"] == {"0": of_first, "1": of_second - goes}
    assert load["peers"] == {"0": of_second - stays, "1": 0}
    assert load["store"] == {"0": 0, "1": of_third}


def test_a_machine_comes_and_layers_move_back(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three machines become two, and three again. The layers are as in the beginning then."""
    hosts.script = training(hosts.folder, SLOW_UNTIL_TOLD, iterations=UNTIL_TOLD)
    monkeypatch.setenv("EXAMPLE", "even_layers")
    monkeypatch.setenv("QUICK", str(UNTIL_TOLD // 2))
    flags = ["--nnodes", "3", "--elastic-wait", "0.2"]
    for name, node in (("first", 0), ("second", 1), ("third", 2)):
        hosts.start(name, node, *flags)
    hosts.wait_for("iteration 6:", "third")
    second = hosts.processes.pop("second")
    second.kill()
    second.wait()
    hosts.wait_for("layers move after iteration", "first")
    hosts.start("fourth", 1, *flags)
    hosts.wait_for("machine 1 leaves: it was a guest", "first")
    hosts.wait_for(": 3, 3, 4 on the stages", "first")
    (hosts.folder / "go").touch()
    assert hosts.end() == {"first": 0, "third": 0, "fourth": 0}
    run = ClusterRun(hosts.folder, 0, "", {})
    assert [len(layers) for layers in layers_of(run)] == [3, 3, 4]
    whole = training(tmp_path, EVEN, iterations=UNTIL_TOLD)
    assert_same_layers(run, run_cluster(tmp_path, machines=3, script=whole))


@pytest.mark.thorough
def test_four_then_three_then_four_then_two_then_four(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two neighbours are lost at once, and two machines come."""
    hosts.script = training(hosts.folder, SLOW_UNTIL_TOLD, iterations=4 * UNTIL_TOLD)
    monkeypatch.setenv("EXAMPLE", "even_layers")
    monkeypatch.setenv("QUICK", str(4 * UNTIL_TOLD))
    flags = ["--nnodes", "2:4", "--elastic-wait", "0.2"]

    def lose(*names: str) -> None:
        for name in names:
            hosts.processes[name].kill()
        for name in names:
            hosts.processes.pop(name).wait()

    def wait_for_layouts(count: int) -> None:
        wait_until(lambda: hosts.output("one").count("layers move after") >= count, f"{count} layouts", 120)

    for node, name in enumerate(("one", "two", "three", "four")):
        hosts.start(name, node, *flags)
    hosts.wait_for("iteration 6:", "four")
    lose("two")
    wait_for_layouts(1)
    hosts.start("five", 1, *flags)
    wait_for_layouts(2)
    lose("three", "four")
    wait_for_layouts(3)
    hosts.start("six", 2, *flags)
    hosts.start("seven", 3, *flags)
    wait_for_layouts(4)
    wait_until(lambda: hosts.output("one").count(": 2, 3, 2, 3 on the stages") >= 2, "even layers")
    (hosts.folder / "go").touch()
    assert hosts.end() == dict.fromkeys(("one", "five", "six", "seven"), 0)
    run = ClusterRun(hosts.folder, 0, "", {})
    assert [len(layers) for layers in layers_of(run)] == [2, 3, 2, 3]
    whole = training(tmp_path, EVEN, iterations=4 * UNTIL_TOLD)
    assert_same_layers(run, run_cluster(tmp_path, machines=4, script=whole))


def test_a_replay_without_the_job(tmp_path: Path) -> None:
    """It begins with the layers that the worker has in the checkpoint, and knows where they have moved."""
    whole = training(tmp_path / "run", EVEN, iterations=LONG - 1)
    run = run_cluster(tmp_path / "run", *DROPOUT, inject=LOST, machines=3, flags=ALONE, script=whole)
    assert moves(run) == 1, run.output[-3000:]
    where = ["--machine", "2", "--out", str(tmp_path / "out")]
    same = over_backend([*training(tmp_path / "nowhere", EVEN, iterations=LONG - 1), *DROPOUT])
    done = recover("replay", str(run.store), *where, "--", *same)
    assert f"{LONG - 1} iterations completed" in done.stdout, done.stderr
    rebuilt = read_part(Store(str(tmp_path / "out")), SavedPart("rank-00002", ""))
    weights = torch.load(run.folder / "weights" / "rank2.pt", weights_only=True)
    assert len({name.partition(".")[0] for name in weights}) > 4
    assert all(torch.equal(rebuilt[f"models.model.{name}"], weights[name]) for name in weights)


def test_a_stack_inside_of_another_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers could not move, and without a word they would not."""
    monkeypatch.setenv("OF", "layers")
    monkeypatch.setenv("HABITS", "inside")
    run = run_layers(tmp_path)
    assert run.code == 2
    assert "The LayerStack is inside of another module" in one_line(run)


def test_too_many_stages(tmp_path: Path) -> None:
    run = run_layers(tmp_path, "--layers", "1", machines=4)
    assert run.code == 2
    assert "A LayerStack of 3 layers has too few for 4 stages" in one_line(run)
