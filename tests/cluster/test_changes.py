"""Commands that change a running job, on real runs: the result is that of an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.recover.main import main
from tests.cluster.test_drain import Running
from tests.support.cluster import assert_clean, assert_identical

LONG = ("--iterations", "120")


def test_a_stage_moves_and_the_script_is_reloaded(
    tmp_path: Path, references: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two changes of one run. No iteration is computed twice."""
    running = Running(tmp_path, 1)
    at = ["--rdzv-endpoint", running.endpoint, "--timeout", "100"]
    assert main(["move", "1", *at]) == 0
    told = capfd.readouterr().out.splitlines()
    assert told[0].startswith("world 1: planned, on 4 machines: ")
    assert told[-1].startswith("world 1: switched at iteration ")
    assert " after a pause of " in told[-1]
    assert main(["reload", "--json", *at]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["world"], facts["switched"], facts["reason"]) == (2, True, "")
    assert 0 < facts["pause_s"] < facts["seconds"]
    run = running.end()
    assert_identical(run, references(*LONG))
    assert_clean(run)
    assert not run.recoveries
