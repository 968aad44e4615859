"""The side by side with peers really kills a machine, and what it says of our own recovery is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.cells import MACHINES, Case, run
from benchmarks.peers.report import equal
from benchmarks.peers.systems import PLAIN, SWIFT


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_a_machine_is_lost_beside_plain_pytorch(layout: str, tmp_path: Path) -> None:
    case = Case(layout, "spare", 1)
    undisturbed = Case(layout, None, 1)
    plain = run(PLAIN, undisturbed, tmp_path / "plain", [case.last], deadline_s=300)
    ours = run(SWIFT, case, tmp_path / "ours", [case.last], deadline_s=300)
    assert set(ours.digests[case.last]) == set(range(MACHINES))
    assert equal(ours, plain, case.last)
    assert ours.lost == 0
    assert None not in (ours.detected_s, ours.new_s, ours.full_s)
