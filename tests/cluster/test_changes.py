"""Commands that change a running job, on real runs: the result is that of an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.recover.main import main
from tests.cluster.test_drain import Running
from tests.support.cluster import EXAMPLES, assert_clean, assert_identical, run_cluster, training

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


@pytest.mark.thorough
def test_a_job_goes_on_with_fewer_machines_and_with_more(
    tmp_path: Path, tmp_path_factory: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those that are left over leave the run. The spare of the beginning trains at its end."""

    def script(folder: Path) -> list[str]:
        return [*training(folder, EXAMPLES / "train_elastic.py", iterations=120), "--checkpoint-every=10"]

    running = Running(tmp_path, 1, script=script(tmp_path), machines=3)
    at = ["--rdzv-endpoint", running.endpoint, "--timeout", "100"]
    assert main(["scale", "2", *at]) == 0
    told = capfd.readouterr().out.splitlines()
    assert told[0].startswith("world 1: planned, on 2 machines: ")
    assert " has left after " in told[-1]
    assert main(["scale", "4", *at]) == 2
    assert "the job has 3 machines, 1 of them as spares: start 1 more" in capfd.readouterr().err
    assert main(["scale", "3", "--json", *at]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["world"], facts["switched"], facts["left"]) == (2, True, [])
    run = running.end()
    assert run.code == 0, run.output[-3000:]
    assert_clean(run)
    assert not run.recoveries
    folder = tmp_path_factory.mktemp("undisturbed")
    assert_identical(run, run_cluster(folder, script=script(folder), machines=3))
