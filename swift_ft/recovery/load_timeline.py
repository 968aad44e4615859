"""The origins of the bytes of checkpoints that workers loaded, read from the journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry


@dataclass(slots=True)
class CheckpointLoad:
    """What workers have loaded in one generation: of a run that is resumed, or in a recovery.

    Attributes:
        generation: its number.
        own_disk: bytes from the machine's own disk, by rank.
        peers: bytes from other machines' disks, by rank.
        store: bytes from the store, by rank.
    """

    generation: int
    own_disk: dict[int, int] = field(default_factory=dict)
    peers: dict[int, int] = field(default_factory=dict)
    store: dict[int, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def checkpoint_loads(entries: Iterable[Entry]) -> list[CheckpointLoad]:
    """All loads of a run, by generation."""
    found: dict[int, CheckpointLoad] = {}
    for entry in entries:
        match entry.event:
            case ev.WorkerReady(generation=generation, rank=rank) as ready:
                if ready.loaded_own or ready.loaded_peers or ready.loaded_store:
                    load = found.setdefault(generation, CheckpointLoad(generation))
                    load.own_disk[rank] = ready.loaded_own
                    load.peers[rank] = ready.loaded_peers
                    load.store[rank] = ready.loaded_store
    return [found[generation] for generation in sorted(found)]
