"""All machines of a run were lost too often and are left out: the run ends, and another one can begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.config.exit_codes import EXIT_KEPT_OUT
from tests.support.cluster import kill_processes_of
from tests.support.hosts import Hosts

BREAKS = """\
import os
import pathlib
import runpy
import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook

broken = pathlib.Path(os.environ["SWIFT_TEST_FOLDER"], "broken")
steps = []


def breaks(*_):
    steps.append(0)
    if len(steps) == 3 and not broken.exists():
        broken.touch()
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


register_optimizer_step_pre_hook(breaks)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_without_a_machine_that_is_taken_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only machine is left out at once. Its store goes on, and the next launcher begins another run."""
    monkeypatch.setenv("NODE_NAME", "node7")
    hosts = Hosts(tmp_path, iterations=5)
    hosts.script = [str(tmp_path / "breaks.py"), *hosts.script]
    (tmp_path / "breaks.py").write_text(BREAKS)
    flags = ["--nnodes", "1", "--max-machine-failures", "1"]
    try:
        hosts.start_command("store", "swift_ft.cli.store", "--port", hosts.endpoint.rpartition(":")[2])
        hosts.start("first", 0, *flags)
        assert hosts.processes["first"].wait(timeout=120) == EXIT_KEPT_OUT, hosts.output("first")
        why = "no machine of this run is left: too often lost by their own fault were node7/0 "
        assert why in hosts.output("first")
        hosts.start("second", 0, *flags, "--auto-resume")
        assert hosts.processes["second"].wait(timeout=120) == 0, hosts.output("second")
    finally:
        kill_processes_of(tmp_path)
        for process in hosts.processes.values():
            process.wait(timeout=30)
