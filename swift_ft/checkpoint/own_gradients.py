"""A replica's own gradients of the step after each checkpoint, as digests: what a spare can compute again.

runs/<run>/workers/rank-00003.gradients.json     of the newest few checkpoints
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swift_ft.checkpoint.state_digest import StateDigests
from swift_ft.checkpoint.store_claim import history_directory
from swift_ft.errors import SwiftError
from swift_ft.storage.digest import sealed, unsealed
from swift_ft.storage.read_only import read_at_once
from swift_ft.storage.store import Store

_NEWEST = 4
"""An audit begins with the second newest committed checkpoint, and newer ones may be on their way."""


@dataclass(frozen=True, slots=True)
class OwnGradients:
    """One worker's.

    Attributes:
        setup: what its script communicated before the first step (`coordination/setup_communication.py`).
        digests: by completed iterations of the checkpoint, of each gradient in the step after it, before the
            average.
    """

    setup: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[int, StateDigests] = field(default_factory=dict)

    def with_step(self, iteration: int, digests: StateDigests) -> OwnGradients:
        """With another step's. Those of long ago go."""
        found = {**self.digests, iteration: digests}
        return OwnGradients(self.setup, {number: found[number] for number in sorted(found)[-_NEWEST:]})


def write_own_gradients(store: Store, run_id: str, rank: int, own: OwnGradients) -> None:
    """Write or replace a worker's."""
    content = {"setup": dict(own.setup), "digests": {str(step): dict(of) for step, of in own.digests.items()}}
    store.write_json(_path(run_id, rank), sealed(content))


def read_own_gradients(store: Store, run_id: str, world_size: int) -> dict[int, OwnGradients]:
    """Those of a run's workers, by rank. Those without a whole file are missing.

    Raises:
        Exception: what the store's client raised.
    """
    read = read_at_once(lambda rank: _read(store, _path(run_id, rank)), range(world_size))
    return {rank: own for rank, own in enumerate(read) if own is not None}


def _read(store: Store, path: str) -> OwnGradients | None:
    try:
        content = store.read_json(path)
    except SwiftError:  # it is not JSON
        return None
    plain = unsealed(content) if content is not None else None
    if plain is None:
        return None
    return OwnGradients(plain["setup"], {int(step): of for step, of in plain["digests"].items()})


def _path(run_id: str, rank: int) -> str:
    return f"{history_directory(run_id)}/rank-{rank:05d}.gradients.json"
