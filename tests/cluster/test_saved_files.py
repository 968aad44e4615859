"""Files that a script writes with ``torch.save`` are those of an undisturbed run, byte for byte.

Equal values are not enough for that: pickle writes once what is one object, and dictionaries in their order.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun, run_cluster

SCRIPT = Path(__file__).parent / "scripts" / "saves_what_it_has.py"
RESUMED_AT = 3


def run(folder: Path, *args: str, inject: str = "", flags: list[str] | None = None) -> ClusterRun:
    script = [str(SCRIPT), "--store", str(folder / "store")]
    ended = run_cluster(folder, *args, machines=2, inject=inject, flags=flags, script=script)
    assert ended.code == 0, ended.output[-6000:]
    return ended


def assert_same_bytes(one: ClusterRun, other: ClusterRun) -> None:
    ours, theirs = (
        {path.name: path.read_bytes() for path in (each.folder / "out").iterdir()} for each in (one, other)
    )
    assert ours.keys() == theirs.keys()
    assert len(theirs) == 12
    assert not [name for name, content in theirs.items() if ours[name] != content], one.output[-3000:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return run(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("machine", [0, 1])
def test_after_a_replacement_by_a_replica(machine: int, tmp_path: Path, undisturbed: ClusterRun) -> None:
    lost = run(tmp_path, inject=f"kill machine={machine} iteration=5 point=reduce")
    assert [recovery["mode"] for recovery in lost.recoveries] == ["replica"]
    assert_same_bytes(lost, undisturbed)


def test_after_a_resume(tmp_path: Path, undisturbed: ClusterRun) -> None:
    run(tmp_path, "--iterations", str(RESUMED_AT + 1))
    assert_same_bytes(run(tmp_path, flags=["--resume"]), undisturbed)


def test_after_a_replay(tmp_path: Path) -> None:
    reference = run(tmp_path / "undisturbed", "--pipeline")
    replayed = run(tmp_path / "lost", "--pipeline", inject="kill machine=1 iteration=5 point=optimizer")
    assert [recovery["mode"] for recovery in replayed.recoveries] == ["replay"]
    assert_same_bytes(replayed, reference)
