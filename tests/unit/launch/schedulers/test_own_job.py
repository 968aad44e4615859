"""Signals to a launcher are taken for its scheduler's where its variables tell that it has one."""

from __future__ import annotations

import signal

import pytest

from swift_ft.launch.schedulers.own_job import cause_of_stop
from swift_ft.recovery.causes import Cause

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_NODEID": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-0"}


@pytest.mark.parametrize(
    ("environ", "evidence"),
    [
        (SLURM, "this launcher runs in Slurm job 4711: see sacct -j 4711"),
        (POD, "this launcher runs in Kubernetes pod train-0: see kubectl describe pod train-0"),
        (POD | SLURM, "this launcher runs in Slurm job 4711: see sacct -j 4711"),
        ({"PBS_JOBID": "7.head"}, "this launcher runs in PBS job 7.head: see qstat -xf 7.head"),
        ({"LSB_JOBID": "12"}, "this launcher runs in LSF job 12: see bhist -l 12"),
    ],
)
def test_a_stop_within_the_job_of_a_scheduler_is_its_own(environ: dict[str, str], evidence: str) -> None:
    assert cause_of_stop(signal.SIGTERM, environ) == (Cause.SCHEDULER, (evidence,))
    assert cause_of_stop(signal.SIGUSR1, environ) == (Cause.SCHEDULER, (evidence,))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_what_a_terminal_sends_is_a_persons(number: int) -> None:
    assert cause_of_stop(number, SLURM) == ("", ())


@pytest.mark.parametrize("environ", [{}, {"HOSTNAME": "desk"}, {"SLURM_CONF": "/etc/slurm.conf"}])
def test_a_stop_outside_any_scheduler_is_not_called_its_own(environ: dict[str, str]) -> None:
    assert cause_of_stop(signal.SIGTERM, environ) == ("", ())
