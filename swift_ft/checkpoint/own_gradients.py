"""A replica's own work in the step after each checkpoint, as digests: what a spare can compute again.

`checkpoint/worker_files.py` says where they are. Besides the gradients these are what they follow from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from swift_ft.checkpoint.state_digest import StateDigests
from swift_ft.checkpoint.worker_files import GRADIENTS, WorkerFiles, of_rank
from swift_ft.plain import from_plain


@dataclass(frozen=True, slots=True)
class OwnStep:
    """One replica's own work in a step: all that comes before its first average.

    Attributes:
        epoch: in which the checkpoint before was saved. Those saved in an earlier one were given up.
        host: what has computed it, in words. Another processor may round in other ways.
        variables: of the script, as the step began, packed and in hexadecimal digits: each replica has its
            own. Empty if they cannot be kept.
        begin: digests of what its gradients follow from, by what that is.
        gradients: digests of these, by parameter, before they are averaged.
    """

    epoch: int
    host: str
    variables: str
    begin: StateDigests
    gradients: StateDigests


def write_own_steps(files: WorkerFiles, rank: int, steps: Mapping[int, OwnStep]) -> None:
    """Write or replace a worker's.

    Args:
        files: those of its run.
        rank: the worker.
        steps: by completed iterations of the checkpoint before.
    """
    content = {str(iteration): asdict(step) for iteration, step in steps.items()}
    files.write(of_rank(rank, GRADIENTS), content)


def read_own_steps(files: WorkerFiles, rank: int) -> dict[int, OwnStep]:
    """See :func:`write_own_steps`. Empty if there is no whole file."""
    found = files.find(of_rank(rank, GRADIENTS)) or {}
    return {int(iteration): from_plain(OwnStep, step) for iteration, step in found.items()}
