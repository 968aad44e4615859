"""What a worker has started ends with it: its ports and devices are free when a replacement begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import run_cluster
from tests.support.waiting import free_port

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("who", ["worker", "agent", "fails"])
def test_children_of_a_lost_worker_end_with_it(tmp_path: Path, who: str) -> None:
    """Also one that is in a session of its own, and whose parent has ended."""
    script = [str(SCRIPTS / "starts_servers.py"), str(tmp_path), str(free_port()), who]
    run = run_cluster(tmp_path, machines=2, script=script, flags=["--max-restarts", "2"])
    assert (tmp_path / "lost").exists()
    assert run.code == 0, run.output[-3000:]
    assert "both ports are free" in run.output
