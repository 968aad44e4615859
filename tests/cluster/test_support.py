"""Each place of the table of `docs/support.md`: a machine dies, and all ends as in an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun, one_line, run_cluster
from tests.support.integrations import assert_same_files
from tests.support.support_table import CASES, PARALLELISMS, TORCH_SAYS, Case

SCRIPT = Path(__file__).parent / "scripts" / "supports.py"


def run_case(folder: Path, case: Case, inject: str = "") -> ClusterRun:
    script = [str(SCRIPT), case.parallelism, case.feature, str(folder / "store")]
    spread = PARALLELISMS[case.parallelism]
    flags = ["--nproc-per-node", str(spread.workers)]
    return run_cluster(folder, inject=inject, machines=spread.machines, flags=flags, script=script)


def parameters() -> list[object]:
    def parameter(case: Case) -> object:
        marks = [] if case.quick and not case.impossible else [pytest.mark.thorough]
        return pytest.param(case, id=f"{case.feature}, {case.parallelism}", marks=marks)

    return [parameter(case) for case in CASES]


@pytest.mark.parametrize("case", parameters())
def test_a_place(case: Case, tmp_path: Path) -> None:
    if case.impossible:
        run = run_case(tmp_path, case)
        assert run.code == 1, run.output[-3000:]
        assert TORCH_SAYS[case.impossible] in run.output
        return
    if case.refused:
        run = run_case(tmp_path, case)
        assert run.code == 2, run.output[-3000:]
        assert case.refused in one_line(run)
        return
    undisturbed = run_case(tmp_path / "undisturbed", case)
    assert undisturbed.code == 0, undisturbed.output[-3000:]
    run = run_case(tmp_path / "killed", case, PARALLELISMS[case.parallelism].fault)
    assert run.code == 0, run.output[-3000:]
    assert_same_files(run, undisturbed)
    way = PARALLELISMS[case.parallelism].way
    assert [recovery["mode"] for recovery in run.recoveries] == [way], run.output[-3000:]
