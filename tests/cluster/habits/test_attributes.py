"""State in attributes of modules, extra states and the script's own generators: put back, and handed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back

SCRIPT = Path(__file__).parent / "scripts" / "attributes.py"
HABITS = [
    "centre, made anew",
    "centre, in place",
    "counter",
    "counter of a class",
    "list",
    "dictionary of tensors",
    "made in the first forward",
    "expanded",
    "torch.Generator",
    "NumPy's generator",
    "random.Random",
    "extra state, dict",
    "extra state, BytesIO",
    "extra state, uint8",
]


@pytest.mark.parametrize("habit", HABITS)
def test_replicas(habit: str, tmp_path: Path) -> None:
    faults = "kill machine=1 iteration=4 point=reduce committed=3; kill machine=0 iteration=5 point=reduced"
    assert_put_back(tmp_path, SCRIPT, habit, inject=faults)


@pytest.mark.parametrize("habit", ["torch.Generator", "NumPy's generator"])
def test_a_loss_before_generators_were_compared(habit: str, tmp_path: Path) -> None:
    """All replicas have seeded theirs alike: the replacement is given that of the other one."""
    assert_put_back(tmp_path, SCRIPT, habit, inject="kill machine=1 iteration=1 point=reduce")


@pytest.mark.parametrize("habit", ["centre, made anew", "counter of a class", "list", "torch.Generator"])
def test_replicas_by_fsdp(habit: str, tmp_path: Path) -> None:
    """Its class is one that torch has made, and its attributes are the script's."""
    faults = (
        "kill machine=1 iteration=4 point=optimizer committed=3; kill machine=0 iteration=5 point=between"
    )
    assert_put_back(tmp_path, SCRIPT, habit, "shards", inject=faults)


@pytest.mark.parametrize("habit", ["centre, made anew", "counter of a class", "NumPy's generator"])
def test_shards_from_memory(habit: str, tmp_path: Path) -> None:
    fault = "kill machine=1 iteration=5 point=between"
    run = assert_put_back(tmp_path, SCRIPT, habit, "memory", inject=fault)
    assert [recovery["mode"] for recovery in run.recoveries] == ["memory"]


@pytest.mark.parametrize("habit", ["counter of a class", "made in the first forward", "centre, made anew"])
def test_back_to_before_the_first_step(habit: str, tmp_path: Path) -> None:
    """What the first steps have made was not there: the copy of iteration 0 says nothing of it."""
    fault = "kill machine=1 iteration=0 point=between"
    run = assert_put_back(tmp_path, SCRIPT, habit, "memory", inject=fault)
    assert [(recovery["mode"], recovery["resume"]) for recovery in run.recoveries] == [("memory", 0)]


@pytest.mark.parametrize("habit", ["counter of a class", "made in the first forward"])
def test_the_first_step_is_repeated(habit: str, tmp_path: Path) -> None:
    assert_put_back(tmp_path, SCRIPT, habit, "shards", inject="kill machine=1 iteration=0 point=optimizer")


@pytest.mark.parametrize("habit", HABITS)
def test_a_pipeline(habit: str, tmp_path: Path) -> None:
    """The lost stage is replayed from a checkpoint; the other one repeats the step."""
    fault = "kill machine=0 iteration=4 point=backward microbatch=1 committed=3"
    run = assert_put_back(tmp_path, SCRIPT, habit, "pipeline", inject=fault)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
