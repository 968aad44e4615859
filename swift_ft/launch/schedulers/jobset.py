"""``--scheduler jobset``: pods of an Indexed Job, as a JobSet of Kubernetes makes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from swift_ft.errors import SchedulerError
from swift_ft.launch.schedulers.scheduler import run_tool

JOB = "JOB_NAME"
"""The variable with the name of the Job, which the manifest sets from the pod's label."""


class JobSetScheduler:
    """Asks for pods by ``kubectl patch``: a Job with more completions starts more of them.

    A pod that leaves the run ends with exit code 0. Its index is complete then, and no other pod comes for
    it: there is nothing else to give back.

    Args:
        environ: this process's, in which the manifest says what its Job is.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    def ask(self, count: int, reason: str, exclude: Sequence[str] = ()) -> None:
        """See :class:`Scheduler`."""
        if not (job := self._environ.get(JOB)):
            raise SchedulerError(f"{JOB} is not set: the pod's manifest has to say which Job it is of")
        try:
            spec = json.loads(run_tool(["kubectl", "get", "job", job, "--output", "json"]))["spec"]
            pods = int(spec["parallelism"]) + count, int(spec["completions"]) + count
        except (ValueError, KeyError, TypeError) as error:
            raise SchedulerError(f"kubectl says nothing of the pods of Job {job}: {error!r}") from error
        # Kubernetes changes the completions of an Indexed Job only together with its parallelism.
        patch = json.dumps({"spec": {"parallelism": max(pods), "completions": max(pods)}})
        run_tool(["kubectl", "patch", "job", job, "--type=merge", "--patch", patch])

    def give_back(self, machines: Sequence[str]) -> None:
        """See :class:`Scheduler`."""
