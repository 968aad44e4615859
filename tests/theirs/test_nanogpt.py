"""A loop in the manner of nanoGPT: what it ends with and what it kept, whenever a machine is lost."""

from __future__ import annotations

from difflib import ndiff
from pathlib import Path

import pytest

from tests.support.cluster import EXAMPLES, ClusterRun, run_cluster
from tests.support.integrations import assert_same_file

INTEGRATIONS = EXAMPLES / "integrations"
DIES = Path(__file__).parent / "scripts" / "nanogpt_dies.py"
FILES = ("rank0.pt", "rank1.pt", "best.pt")


def run_nanogpt(
    folder: Path, inject: str = "", script: Path = INTEGRATIONS / "nanogpt_swift.py"
) -> ClusterRun:
    places = ["--out", str(folder / "out"), "--store", str(folder / "store"), "--iterations", "16"]
    run = run_cluster(folder, machines=2, inject=inject, script=[str(script), *places])
    assert run.code == 0, run.output[-6000:]
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return run_nanogpt(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    "at",
    [
        "machine=0 iteration=12 point=reduce",
        pytest.param("machine=1 iteration=7 point=reduce", marks=pytest.mark.thorough),
        "machine=1 iteration=9 point=optimizer",
        pytest.param("machine=0 iteration=9 point=between", marks=pytest.mark.thorough),
    ],
)
def test_a_loss(at: str, tmp_path: Path, undisturbed: ClusterRun) -> None:
    run = run_nanogpt(tmp_path, f"kill {at}")
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"], run.output[-3000:]
    for name in FILES:
        assert_same_file(run, undisturbed, name)


def test_a_loss_as_the_best_model_is_saved(tmp_path: Path, undisturbed: ClusterRun) -> None:
    """The other worker has noted its loss, and is in the next step."""
    run = run_nanogpt(tmp_path, script=DIES)
    (recovery,) = run.recoveries
    assert recovery["slots"] == [0], run.output[-3000:]
    for name in FILES:
        assert_same_file(run, undisturbed, name)


def test_how_many_lines_change() -> None:
    """Between the two loops, without indentation and comments: what the page says."""
    plain, swift = (
        [line.strip() for line in (INTEGRATIONS / name).read_text().split("def main")[1].splitlines()]
        for name in ("nanogpt_plain.py", "nanogpt_swift.py")
    )
    changes = [line for line in ndiff(plain, swift) if line[0] in "+-" and "--store" not in line]
    assert sum(line[0] == "+" for line in changes) == 8  # and the import
    assert sum(line[0] == "-" for line in changes) == 8
