"""A replica's own work in the step after each checkpoint, as digests: what a spare can compute again.

runs/<run>/workers/rank-00003.setup.json         what the script communicated before its first step
                   rank-00003.gradients.json     its gradients, and what they follow from, of some steps
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from swift_ft.checkpoint.state_digest import StateDigests
from swift_ft.checkpoint.store_claim import history_directory
from swift_ft.plain import from_plain
from swift_ft.storage.digest import sealed
from swift_ft.storage.sealed_file import read_whole
from swift_ft.storage.store import Store


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


def write_setup(store: Store, run_id: str, rank: int, setup: Mapping[str, str]) -> None:
    """Write what a worker's script communicated before its first step.

    Args:
        run_id: the run.
        rank: the worker.
        setup: by key (`coordination/setup_communication.py`).
    """
    store.write_json(_path(run_id, rank, "setup"), sealed(dict(setup)))


def read_setup(store: Store, run_id: str, rank: int) -> dict[str, str] | None:
    """See :func:`write_setup`. None if there is no whole file."""
    return read_whole(store, _path(run_id, rank, "setup"))[0]


def write_own_steps(store: Store, run_id: str, rank: int, steps: Mapping[int, OwnStep]) -> None:
    """Write or replace a worker's.

    Args:
        run_id: the run.
        rank: the worker.
        steps: by completed iterations of the checkpoint before.
    """
    content = {str(iteration): asdict(step) for iteration, step in steps.items()}
    store.write_json(_path(run_id, rank, "gradients"), sealed(content))


def read_own_steps(store: Store, run_id: str, rank: int) -> dict[int, OwnStep]:
    """See :func:`write_own_steps`. Empty if there is no whole file."""
    found, _ = read_whole(store, _path(run_id, rank, "gradients"))
    return {int(iteration): from_plain(OwnStep, step) for iteration, step in (found or {}).items()}


def _path(run_id: str, rank: int, what: str) -> str:
    return f"{history_directory(run_id)}/rank-{rank:05d}.{what}.json"
