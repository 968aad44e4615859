"""The scheduler's job in which this launcher runs, and the signals that are taken for the scheduler's."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from swift_ft.launch.signals import FOR_WORKERS, stopped_by
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause

_JOBS = (
    ("SLURM_JOB_ID", "Slurm job", "sacct -j"),
    ("PBS_JOBID", "PBS job", "qstat -xf"),
    ("LSB_JOBID", "LSF job", "bhist -l"),
    # Last: each of the others may run in pods.
    ("HOSTNAME", "Kubernetes pod", "kubectl describe pod"),
)
"""A variable with the name of the job, what it is one of, and the command that shows what became of it."""
_SENT = frozenset({signal.SIGTERM, *FOR_WORKERS})
"""Schedulers send these before a time limit, a preemption or an eviction; SIGKILL follows, as a rule.

Python is not told who has sent a signal. The other ones come from a terminal, as a rule.
"""


def end_by_signal(number: int) -> ev.JobClosed:
    """The end of a run whose launcher a signal stops."""
    cause, evidence = cause_of_stop(number)
    return ev.JobClosed(reason=stopped_by(number), exit_code=128 + number, cause=cause, evidence=evidence)


def cause_of_stop(number: int, environ: Mapping[str, str] = os.environ) -> tuple[str, tuple[str, ...]]:
    """The cause of this launcher's stop by a signal. Not for workers: nothing shows who has killed one.

    Args:
        number: the signal, such as ``signal.SIGTERM``.
        environ: the launcher's variables.

    Returns:
        The cause and the evidence of it; both are empty where nothing shows a scheduler.
    """
    if number not in _SENT:
        return "", ()
    jobs = _JOBS if "KUBERNETES_SERVICE_HOST" in environ else _JOBS[:-1]
    for variable, what, command in jobs:
        if name := environ.get(variable):
            return Cause.SCHEDULER.value, (f"this launcher runs in {what} {name}: see {command} {name}",)
    return "", ()
