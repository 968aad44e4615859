"""Experts and sequences that are divided among workers: killed anywhere, and resumed over other meshes.

The examples, as they are: a lost worker's state comes from a replica where another worker holds the same, and
from another machine's memory where none does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster import SMALL, ClusterRun, once, run_cluster
from tests.support.integrations import assert_same_files
from tests.support.plain_run import Job, run_plain

SCRIPT = Path(__file__).parent / "scripts" / "dies_in_example.py"
SMALLER = [*SMALL, "--layers=2", "--checkpoint-every=3"]
ITERATIONS, DEATH_AT, COPIED = 7, 5, 4
AT, MORE = 6, 3
"""The checkpoint that another mesh goes on from, and its iterations."""


@dataclass(frozen=True)
class Training:
    """An example over a mesh.

    Attributes:
        example: its module.
        args: of it.
        machines: of one worker each.
    """

    example: str
    args: tuple[str, ...] = ()
    machines: int = 4

    @property
    def way(self) -> str:
        """Of its recoveries."""
        return "memory" if "--replicas=1" in self.args else "replica"


ONCE = ("--replicas=1", "--snapshot-every=2")
TRAININGS = {
    "experts in two replicas": Training("train_moe"),
    "experts, and shards of them": Training("train_moe", ONCE),
    "experts of four workers": Training("train_moe", (*ONCE, "--ep=4")),
    "experts of two workers": Training("train_moe", ONCE, machines=2),
    "experts of one worker": Training("train_moe", ("--replicas=1", "--ep=1"), machines=1),
    "sequences in two replicas": Training("train_context_parallel"),
    "sequences over four workers": Training("train_context_parallel", ONCE),
    "sequences over two workers": Training("train_context_parallel", ONCE, machines=2),
}


def command(folder: Path, training: Training, *args: str) -> list[str]:
    """The script with its arguments."""
    return [str(SCRIPT), training.example, *SMALLER, f"--store={folder / 'store'}", *training.args, *args]


def train(
    folder: Path,
    training: Training,
    *args: str,
    death: object = None,
    spares: int = 1,
    flags: tuple[str, ...] = (),
) -> ClusterRun:
    """One worker dies where it is told to."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SWIFT_TEST_DEATH", json.dumps(death or {}))
        script = command(folder, training, *args)
        return run_cluster(
            folder, script=script, machines=training.machines, flags=["--spares", str(spares), *flags]
        )


WITH_DROPOUT = ("--dropout=0.1", f"--iterations={ITERATIONS}")
Reference = Callable[[str], ClusterRun]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs, by the name of the training."""
    return once(tmp_path_factory, lambda folder, name: train(folder, TRAININGS[name], *WITH_DROPOUT))


EXPERTS = {
    "forward, its tokens are not sent": "before all_to_all 2",
    "forward, the others have them": "after all_to_all 6",
    "backward": "before all_to_all 8",
    "backward, the others have its gradients": "after all_to_all 10",
}
SEQUENCES = {
    "forward, keys are not sent": "before gathering of keys 3",
    "forward, the others have them": "after gathering of keys 4",
    "backward, gradients of keys": "before sum for keys 2",
    "backward, the others have them": "after sum for keys 3",
}
ANY = {
    "begin of a step": "begin",
    "clipping": "before all_reduce 1",
    "optimizer": "before step",
    "end of the update": "after step",
}


def losses() -> list[Any]:
    """Each point in each training; a choice of them by default."""
    chosen = {
        ("experts in two replicas", "backward"),
        ("sequences over four workers", "forward, keys are not sent"),
    }
    found = []
    for name, training in TRAININGS.items():
        if training.machines < 4:
            continue
        points = EXPERTS if training.example == "train_moe" else SEQUENCES
        for number, (where, point) in enumerate({**points, **ANY}.items()):
            marks = [] if (name, where) in chosen else [pytest.mark.thorough]
            found.append(pytest.param(name, (number + 1) % 4, point, id=f"{name}, {where}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "rank", "point"), losses())
def test_a_machine_is_lost(name: str, rank: int, point: str, tmp_path: Path, undisturbed: Reference) -> None:
    training = TRAININGS[name]
    death = {"rank": rank, "iteration": DEATH_AT, "point": point}
    if training.way == "memory":
        death["copied"] = COPIED
    run = train(tmp_path, training, *WITH_DROPOUT, death=death)
    assert run.code == 0, run.output[-6000:]
    assert [recovery["mode"] for recovery in run.recoveries] == [training.way], run.output[-3000:]
    assert_same_files(run, undisturbed(name))


@pytest.mark.thorough
def test_bits_are_those_of_torchrun(tmp_path: Path, undisturbed: Reference) -> None:
    names = [name for name, training in TRAININGS.items() if training.machines == 4]
    folders = {name: tmp_path / str(number) for number, name in enumerate(names)}
    jobs = [
        Job(str(folder), command(folder, TRAININGS[name], *WITH_DROPOUT)) for name, folder in folders.items()
    ]
    for name, plain in zip(names, run_plain(tmp_path, jobs, workers=4), strict=True):
        assert_same_files(undisturbed(name), plain)


State = dict[str, torch.Tensor]


def whole(files: list[Path]) -> State:
    """The state, put together from what each worker wrote. Replicas wrote the same."""
    found: State = {}
    for file in files:
        parts: dict[str, Any] = torch.load(file)
        del parts["random"]
        for name, (box, values) in parts.items():
            shape, offset = box if box is not None else (values.shape, [0] * values.dim())
            target = found.setdefault(name, torch.full(shape, float("nan")))
            here = target[tuple(slice(a, a + size) for a, size in zip(offset, values.shape, strict=True))]
            assert here.isnan().all() or torch.equal(here, values), name
            here.copy_(values)
    assert found
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def end_of(run: ClusterRun, training: Training) -> State:
    """The state with which a run ends."""
    return whole([run.folder / "out" / f"rank{rank}.pt" for rank in range(training.machines)])


RESHAPES = [
    ("experts in two replicas", "experts of four workers"),
    ("sequences in two replicas", "sequences over two workers"),
    ("experts in two replicas", "experts of one worker"),
    ("experts in two replicas", "experts, and shards of them"),
    ("experts, and shards of them", "experts of two workers"),
    ("experts of one worker", "experts in two replicas"),
    ("experts of four workers", "experts, and shards of them"),
    ("sequences in two replicas", "sequences over four workers"),
    ("sequences over two workers", "sequences in two replicas"),
]


@dataclass(frozen=True)
class Reshaped:
    """A run that another mesh goes on with: the whole state as it was saved, loaded, and at the end."""

    saved: State
    loaded: State
    ended: State


def reshaped(folder: Path, first: str, then: str) -> Reshaped:
    before, after = TRAININGS[first], TRAININGS[then]
    begun = train(folder, before, f"--iterations={AT}", spares=0)
    assert begun.code == 0, begun.output[-3000:]
    saved = end_of(begun, before)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SWIFT_TEST_AT", str(AT))
        resumed = train(folder, after, f"--iterations={AT + MORE}", spares=0, flags=("--resume",))
    assert resumed.code == 0, resumed.output[-3000:]
    loaded = whole([folder / "out" / f"{after.machines}-{rank}.pt" for rank in range(after.machines)])
    return Reshaped(saved, loaded, end_of(resumed, after))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(*pair, marks=[pytest.mark.thorough] if number > 0 else [])
        for number, pair in enumerate(RESHAPES)
    ],
)
def test_another_mesh_goes_on(first: str, then: str, tmp_path: Path) -> None:
    """From the very state that was saved."""
    run = reshaped(tmp_path, first, then)
    assert run.loaded.keys() == run.saved.keys()
    assert not [name for name in run.saved if not torch.equal(run.loaded[name], run.saved[name])]
    weights = [name for name in run.saved if name.startswith("model.")]
    assert not [name for name in weights if torch.equal(run.ended[name], run.saved[name])]


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "then"), RESHAPES[:2])
def test_sums_in_another_order_are_all_that_differs(first: str, then: str, tmp_path: Path) -> None:
    """By less than a hundred-thousandth of what these iterations change."""
    run = reshaped(tmp_path / "reshaped", first, then)
    mesh = TRAININGS[first]
    ended = end_of(train(tmp_path / "one mesh", mesh, f"--iterations={AT + MORE}", spares=0), mesh)
    weights = [name for name in ended if name.startswith("model.")]
    difference = torch.stack([(run.ended[name] - ended[name]).norm() for name in weights]).norm()
    change = torch.stack([(ended[name] - run.saved[name]).norm() for name in weights]).norm()
    assert 0 < difference < 1e-5 * change
