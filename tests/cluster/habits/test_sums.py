"""Sums of losses in an epoch: of all replicas they are right, and of one a line says that they are not."""

from __future__ import annotations

from pathlib import Path

from tests.support.habits import assert_put_back

SCRIPT = Path(__file__).parent / "scripts" / "sums.py"


def test_sums_of_losses(tmp_path: Path) -> None:
    """The replacement has the count of its own losses, and not their sum."""
    loss = "kill machine=0 iteration=9 point=reduce"
    run = assert_put_back(tmp_path, SCRIPT, inject=loss)
    (line,) = [one for one in run.output.splitlines() if "steps go on with" in one]
    assert "[machine 0] " in line
    behind, _, beside = line.partition(" of an earlier iteration than ")
    assert "steps go on with (loop).total, train_one_epoch().own." in behind
    assert "(loop).alike" not in behind
    assert "meter" not in behind
    assert (
        "(loop).count, train_one_epoch().own.count: a sum or a mean of it, if there is one, is wrong"
        in beside
    )
    assert "dist.all_reduce()" in beside
