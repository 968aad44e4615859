"""A running job changes to another world, whichever way its work is divided."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from swift_ft.data import samples_by_iteration
from swift_ft.data.order import SampleOrder
from tests.support.cluster import (
    BACKEND,
    EXAMPLES,
    SMALL,
    ClusterRun,
    assert_clean,
    assert_identical,
    run_cluster,
)
from tests.support.integrations import assert_same_files
from tests.support.worlds import Change, given_up, run_changed, worlds_of

SCRIPTS = Path(__file__).parent / "scripts"
ITERATIONS = 60


@dataclass(frozen=True)
class Kind:
    """A script, and how it is run.

    Attributes:
        example: its module.
        machines: that take part.
        args: of the script.
        flags: of the launcher.
    """

    example: str
    machines: int
    args: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        """Its file."""
        folder = EXAMPLES if self.example.startswith("train_") else SCRIPTS
        return str(folder / f"{self.example}.py")


DROPOUT = ("--layers=2", "--dropout=0.1")
KINDS = {
    "hsdp": Kind("train_hsdp", 4, DROPOUT),
    "experts": Kind("train_moe", 4, DROPOUT),
    "experts once": Kind("train_moe", 4, (*DROPOUT, "--replicas=1")),
    "sequences": Kind("train_context_parallel", 4, DROPOUT),
    "statistics": Kind("running_statistics", 2, ("--layers=2", "--bucket-mb=0.01")),
    "stages of two workers on each machine": Kind(
        "train_swift", 2, ("--dropout=0.1",), ("--nproc-per-node=2",)
    ),
    "replicas": Kind("train_ddp", 2, DROPOUT),
    "four replicas": Kind("train_ddp", 4, (*DROPOUT, "--bucket-mb=0.02")),
    "two stages on each worker": Kind("train_elastic", 4, ("--schedule=Interleaved1F1B",)),
    "layers": Kind("train_elastic", 4),
    "stages": Kind("train_swift", 3, ("--dropout=0.1",)),
}


def arguments(folder: Path, kind: Kind, *more: str, iterations: int = ITERATIONS) -> list[str]:
    """Of its script, whose store and weights are in a folder."""
    places = [f"--store={folder / 'store'}", f"--weights-out={folder / 'weights'}"]
    return [*SMALL, f"--iterations={iterations}", "--checkpoint-every=20", *places, *kind.args, *more]


def run_kind(
    folder: Path,
    kind: Kind,
    *more: str,
    machines: int = 0,
    iterations: int = ITERATIONS,
    resume: bool = False,
) -> ClusterRun:
    """An undisturbed run, or one that goes on from the last checkpoint."""
    run = run_cluster(
        folder,
        machines=machines or kind.machines,
        script=[kind.script, *arguments(folder, kind, *more, iterations=iterations)],
        flags=[*kind.flags, *(["--resume"] if resume else [])],
    )
    assert run.code == 0, run.output[-3000:]
    return run


def change(
    folder: Path,
    kind: Kind,
    slots: Sequence[int],
    args: Sequence[str] = (),
    *,
    machines: int = 0,
    spares: int = 0,
) -> ClusterRun:
    """A run that changes once."""
    changes: list[Change] = [(3, [*slots], [*args])]
    run = run_changed(
        folder,
        kind.example,
        changes,
        arguments(folder, kind),
        machines=machines or kind.machines,
        flags=[*kind.flags, f"--spares={spares}"],
    )
    assert len(worlds_of(run)) == 1
    assert not given_up(run)
    assert_clean(run)
    return run


Over = Callable[[str], None]


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Over:
    """All that follows trains over another backend."""
    return lambda backend: monkeypatch.setenv(BACKEND, backend)


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("statistics", [1, 0]),
        *(
            pytest.param(name, slots, marks=pytest.mark.thorough)
            for name, slots in [
                ("hsdp", [2, 4, 0, 1]),
                ("experts", [3, 2, 1, 4]),
                ("sequences", [2, 4, 0, 1]),
                ("stages of two workers on each machine", [1, 2]),
                ("four replicas", [3, 2, 1, 0]),
            ]
        ),
    ],
)
def test_machines_change_places(
    name: str, slots: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is a spare where there is one. All bits are those of a run that does not change."""
    monkeypatch.setenv("STATISTICS", "ddp")
    kind = KINDS[name]
    spares = int(max(slots) >= kind.machines)
    run = change(tmp_path / "changed", kind, slots, spares=spares)
    assert_identical(run, run_kind(tmp_path / "undisturbed", kind))


@pytest.mark.parametrize(("first", "slots"), [(3, [2, 0]), (2, [0, 2, 1, 3])])
@pytest.mark.thorough
def test_stages_that_take_turns_are_dealt_anew(first: int, slots: list[int], tmp_path: Path) -> None:
    """Each worker has two stages, before and after."""
    kind = KINDS["two stages on each worker"]
    run = change(tmp_path / "changed", kind, slots, machines=first, spares=max(0, len(slots) - first))
    assert_identical(run, run_kind(tmp_path / "undisturbed", kind, machines=len(slots)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "slots", "first"), [("replicas", [1, 2], 2), ("layers", [0, 2], 3), ("layers", [1, 0, 3, 2], 3)]
)
def test_over_a_backend_that_is_like_nccl(
    name: str, slots: list[int], first: int, tmp_path: Path, over: Over
) -> None:
    """The groups of the present world are given up while others form."""
    over("nccl_like")
    kind = KINDS[name]
    run = change(tmp_path / "changed", kind, slots, machines=first, spares=1)
    assert_identical(run, run_kind(tmp_path / "undisturbed", kind, machines=len(slots)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "slots", "args"),
    [
        ("experts", [0, 1, 2, 3], ["--replicas", "1", "--ep", "4"]),
        ("experts once", [2, 1, 0, 3], ["--replicas", "2"]),
        ("experts once", [2, 0], ["--ep", "1"]),
        ("sequences", [0, 2], ["--replicas", "1"]),
        ("hsdp", [2, 1], []),
    ],
)
def test_a_mesh_is_another_one(name: str, slots: list[int], args: list[str], tmp_path: Path) -> None:
    """All goes on as from a checkpoint of that iteration that is loaded into the other mesh."""
    kind = KINDS[name]
    run = change(tmp_path / "changed", kind, slots, args)
    (world,) = worlds_of(run)
    since, folder = world.worlds.present.since, tmp_path / "from_store"
    run_kind(folder, kind, f"--checkpoint-every={since}", iterations=since)
    shutil.rmtree(folder / "weights")
    resumed = run_kind(folder, kind, *args, machines=len(slots), resume=True)
    assert_identical(run, resumed)


STEPS, EPOCHS = 6, 12


@pytest.mark.thorough
def test_an_epoch_goes_on_where_it_was(tmp_path: Path) -> None:
    """Most often in the middle of one, with the order of its samples and the script's own files."""
    runs = []
    for name in ("changed", "undisturbed"):
        folder = tmp_path / name
        args = [f"--store={folder / 'store'}", f"--out={folder / 'out'}", f"--epochs={EPOCHS}"]
        if name == "changed":
            runs.append(run_changed(folder, "train_epochs", [(STEPS + 2, [1, 0], [])], args, machines=2))
        else:
            script = [str(EXAMPLES / "train_epochs.py"), *args]
            runs.append(run_cluster(folder, machines=2, script=script))
    changed, undisturbed = runs
    assert len(worlds_of(changed)) == 1
    assert not given_up(changed)
    assert_same_files(changed, undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "slots"), [(2, [2, 0, 1]), (3, [2, 0])])
def test_replicas_share_the_batches_anew(
    first: int, slots: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sample is trained on once and in its place, by however many replicas."""
    samples, batch = 2400, 24
    settings = {"SAMPLES": samples, "BATCH": batch, "LOADERS": 0, "UNLIKE": 0, "SAMPLE_LOG": tmp_path / "log"}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    folder, iterations = tmp_path / "changed", samples // batch
    args = [f"--iterations={iterations}", "--checkpoint-every=20"]
    args += [f"--store={folder / 'store'}", f"--weights-out={folder / 'weights'}"]
    run = run_changed(folder, "sees_samples", [(3, slots, [])], args, machines=first, flags=["--spares=1"])
    assert len(worlds_of(run)) == 1
    assert not given_up(run)
    order = SampleOrder([samples], shuffle=True, seed=5).at(0, samples)
    assert samples_by_iteration(tmp_path / "log") == {
        number: order[number * batch : (number + 1) * batch] for number in range(iterations)
    }
    expected = torch.empty(samples, dtype=torch.float64)
    expected[torch.tensor(order)] = torch.arange(samples, dtype=torch.float64)
    for rank in range(len(slots)):
        assert torch.equal(run.weights()[f"rank{rank}.times"], torch.ones(samples, dtype=torch.float64))
        assert torch.equal(run.weights()[f"rank{rank}.place"], expected)


@pytest.mark.parametrize(
    ("name", "slots"), [("replicas", [0, 1, 2]), pytest.param("stages", [0, 2], marks=pytest.mark.thorough)]
)
def test_what_cannot_be_dealt_anew_is_refused(name: str, slots: list[int], tmp_path: Path) -> None:
    """Before the present world stops for it."""
    kind = KINDS[name]
    args = arguments(tmp_path / "changed", kind)
    flags = ["--spares=1"]
    run = run_changed(
        tmp_path / "changed", kind.example, [(3, slots, [])], args, machines=kind.machines, flags=flags
    )
    assert not worlds_of(run)
    assert not run.events("SwitchRequested")
    why = given_up(run)[0]
    assert "cannot be dealt anew for another topology (machines" in why
    assert ("swift_ft.data.GlobalBatches" in why) == (name == "replicas")
    assert_identical(run, run_kind(tmp_path / "undisturbed", kind))
