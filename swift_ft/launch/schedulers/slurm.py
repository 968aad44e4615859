"""``--scheduler slurm``: a machine more is a job of its own; a node that is given back leaves its job."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from swift_ft.errors import SchedulerError
from swift_ft.launch.schedulers.scheduler import RunPlace, run_tool

_SAME = {"--account": "SLURM_JOB_ACCOUNT", "--partition": "SLURM_JOB_PARTITION", "--qos": "SLURM_JOB_QOS"}
"""Options of the jobs of further machines that are those of this job, and the variables that have them."""


class SlurmScheduler:
    """Asks with ``sbatch``, and gives back with ``scontrol``.

    A job of one node ends with its launcher, so it needs not be given back. A node of a larger job leaves it
    (``scontrol update NodeList=``). The first node stays: Slurm ends a job with it.

    Args:
        place: the run.
        environ: this process's, in which Slurm says what its job is.
    """

    def __init__(self, place: RunPlace, environ: Mapping[str, str] = os.environ) -> None:
        self._place = place
        self._environ = environ

    def ask(self, count: int, reason: str, exclude: Sequence[str] = ()) -> None:
        """See :class:`Scheduler`."""
        same = [
            f"{option}={self._environ[name]}" for option, name in _SAME.items() if self._environ.get(name)
        ]
        more = shlex.split(self._environ.get("SWIFT_SBATCH", ""))
        job = ["--job-name", f"swift-{self._place.run_id}", "--comment", reason, "--nodes=1", "--exclusive"]
        # The rank of this node, and what the tasks of this job were given, are none of the new machine's.
        export = "--export=ALL,PET_NODE_RANK="
        command = shlex.join(self._place.launch)
        job += [f"--exclude={','.join(nodes)}"] if (nodes := _known(exclude)) else []
        for _ in range(count):
            run_tool(["sbatch", *job, "--ntasks-per-node=1", *same, export, *more, "--wrap", command])

    def give_back(self, machines: Sequence[str]) -> None:
        """See :class:`Scheduler`."""
        job, node = self._environ.get("SLURM_JOB_ID"), self._environ.get("SLURMD_NODENAME")
        if not job or not node:
            raise SchedulerError(
                "SLURM_JOB_ID and SLURMD_NODENAME are not set: this is no task of a Slurm job"
            )
        listed = run_tool(["squeue", "--noheader", "--jobs", job, "--format", "%N"]).strip()
        nodes = run_tool(["scontrol", "show", "hostnames", listed]).split()
        if node not in nodes or len(nodes) == 1:
            return
        if nodes[0] == node and self._environ.get("SLURM_NODEID", "0") == "0":
            raise SchedulerError(f"{node} is the first node of job {job}, which would end without it")
        others = ",".join(other for other in nodes if other != node)
        run_tool(["scontrol", "update", f"JobId={job}", f"NodeList={others}"])


def _known(nodes: Sequence[str]) -> list[str]:
    """Those that Slurm knows by these names: it refuses a job that excludes any other."""
    if not nodes:
        return []
    try:
        known = run_tool(["sinfo", "--noheader", "--Node", "--format", "%N"]).split()
    except SchedulerError:  # better any node than none
        return []
    return [node for node in nodes if node in known]
