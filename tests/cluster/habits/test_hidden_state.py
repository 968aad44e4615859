"""A replay diverges: all processes begin anew from the checkpoint, or a strange machine is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun
from tests.support.habits import assert_put_back, run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "hidden_state.py"
TWO_WORKERS = ["--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("habit", "fault", "checkpoint", "flags"),
    [
        ("counter", "kill machine=1 iteration=5 point=forward microbatch=1 committed=3", 3, []),
        ("late", "kill machine=1 iteration=8 point=forward microbatch=1 committed=6", 6, TWO_WORKERS),
    ],
    ids=["from the first iteration on", "later, and two workers on a machine"],
)
def test_processes_begin_anew_from_the_checkpoint(
    habit: str, fault: str, checkpoint: int, flags: list[str], tmp_path: Path
) -> None:
    """What nothing can see is then as it is after a resume: the end is the same to the bit."""
    run = run_habit(tmp_path / "disturbed", SCRIPT, habit, "9", inject=fault, flags=flags)
    assert run.code == 0, run.output[-6000:]
    recovery = run.recoveries[-1]
    assert (recovery["mode"], recovery["resume"]) == ("restart", checkpoint), run.output[-6000:]
    assert "The replay diverged" in recovery["reason"]
    assert f"all processes start again from the checkpoint of iteration {checkpoint}" in run.output
    assert sum(recovery["iterations_lost"].values())
    assert_same_files(run, resumed(tmp_path / "resumed", habit, at=checkpoint, flags=flags))


def resumed(folder: Path, habit: str, *, at: int, flags: list[str]) -> ClusterRun:
    """The same training, ended at a checkpoint, and resumed by new processes."""
    ended = run_habit(folder, SCRIPT, habit, str(at), flags=flags)
    assert ended.code == 0, ended.output[-6000:]
    run = run_habit(folder, SCRIPT, habit, "9", flags=[*flags, "--resume"])
    assert run.code == 0, run.output[-6000:]
    return run


@pytest.mark.parametrize("helpers", [0, 1])
def test_a_machine_that_computes_something_else_is_refused(helpers: int, tmp_path: Path) -> None:
    """The survivors keep their state, and the next machine replays. First a helper could be what differs."""
    fault = "kill machine=1 iteration=5 point=forward microbatch=1 committed=3"
    flags = ["--helpers", str(helpers)]
    run = assert_put_back(tmp_path, SCRIPT, "machine", inject=fault, flags=flags)
    (failed,) = run.events("ReplayFailed")
    assert (failed["diverged"], failed["differs_at"]) == (True, 3)
    assert "machine 1 is refused" in run.output
    assert {recovery["mode"] for recovery in run.recoveries} == {"replay"}, run.output[-6000:]
