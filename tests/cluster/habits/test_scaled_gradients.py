"""A loss between `scaler.unscale_()` and `scaler.update()`: survivors unscale again in the repeated step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import assert_undisturbed
from tests.support.habits import run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "scales.py"


@pytest.mark.parametrize(("how", "mode"), [("replicas", "replica"), ("shards", "memory")])
def test_unscaled_and_interrupted(how: str, mode: str, tmp_path: Path) -> None:
    undisturbed = assert_undisturbed(run_habit(tmp_path / "undisturbed", SCRIPT, how, "none"))
    run = run_habit(tmp_path / "disturbed", SCRIPT, how, "lost")
    assert run.code == 0, run.output[-6000:]
    (recovery,) = run.recoveries
    assert recovery["mode"] == mode, run.output[-3000:]
    assert_same_files(run, undisturbed)
