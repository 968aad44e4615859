"""What a worker has started ends with it: its ports and devices are free when a replacement begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.ports import free_port
from tests.support.cluster import run_cluster

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("who", ["worker", "agent", "fails"])
def test_children_of_a_lost_worker_end_with_it(tmp_path: Path, who: str) -> None:
    """Also one that is in a session of its own, and whose parent has ended."""
    script = [str(SCRIPTS / "starts_servers.py"), str(tmp_path), str(free_port(in_a_row=2)), who]
    run = run_cluster(tmp_path, machines=2, script=script, flags=["--max-restarts", "2"])
    assert (tmp_path / "lost").exists()
    assert run.code == 0, run.output[-3000:]
    assert "both ports are free" in run.output
