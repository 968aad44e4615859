"""A guest has a place of its own on its host; one that cannot begin costs its host, and not the run."""

from __future__ import annotations

from pathlib import Path

from tests.support.habits import assert_put_back

SCRIPT = Path(__file__).parent / "scripts" / "needs_a_port.py"
ALONE = ["--spares", "0", "--no-replacement", "--elastic-wait", "0.2"]
KILL = "kill machine=1 iteration=4 point=optimizer"


def test_a_guest_has_a_local_rank_of_its_own(tmp_path: Path) -> None:
    run = assert_put_back(tmp_path, SCRIPT, inject=KILL, flags=ALONE)
    assert "[machine 1] local rank 1" in run.output
    assert "[machine 0] local rank 0" in run.output


def test_a_guest_that_cannot_begin_is_declined(tmp_path: Path) -> None:
    """The next survivor takes one."""
    run = assert_put_back(tmp_path, SCRIPT, "taken", inject=KILL, machines=3, flags=ALONE)
    assert (run.folder / "taken").exists()
    assert "Address already in use" in run.output
    assert "machine 2 runs the workers of machine 1, too" in run.output
