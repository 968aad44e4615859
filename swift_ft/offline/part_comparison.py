"""Compares two rebuilt or saved states of a worker, bit for bit."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swift_ft.checkpoint.folder import MARKER, CheckpointFolder
from swift_ft.checkpoint.manifest import digest_of_manifest, read_marker
from swift_ft.checkpoint.state_digest import STORED_AS, differing
from swift_ft.checkpoint.state_payload import unpack
from swift_ft.checkpoint.state_values import OF_ONE_RUN, RANDOM, VARIABLES, digests, is_in, leaves
from swift_ft.errors import UsageError
from swift_ft.offline.run_store import store_errors
from swift_ft.recovery.job_state import SavedPart
from swift_ft.storage.read_only import ReadOnlyStore
from swift_ft.storage.store import Store

REPLAY_RECORD = "replay.json"
"""The file in a replay's folder that describes it. It is written last: without it the replay has failed."""

_METADATA = ".metadata"
_DIGESTS = f"plain.bytes.{STORED_AS}"


def find_parts(url: str) -> dict[int | None, tuple[Store, SavedPart]]:
    """The saved states in a place, by rank.

    Args:
        url: the part of one worker (rank None), the folder of a checkpoint, or that of a replay.

    Raises:
        UsageError: it is none of these, or cannot be read.
    """
    store = ReadOnlyStore(url, patience_s=10.0)
    parent, _, name = url.rstrip("/").rpartition("/")
    with store_errors(store):
        if store.exists(_METADATA):
            return {None: (ReadOnlyStore(parent or ".", patience_s=10.0), SavedPart(name, ""))}
        for marker in (MARKER, REPLAY_RECORD):
            if (content := read_marker(store, marker, marker)) is not None:
                digests = content["digests"]
                return {
                    int(rank): (store, SavedPart(path.rsplit("/", 1)[-1], digests[path]))
                    for rank, path in content["parts"].items()
                }
    raise UsageError(
        f"{store.url} holds no saved state: give STORE/checkpoints/ITERATION, one of the parts in it, or the "
        "folder of another replay"
    )


def iteration_of(url: str) -> int | None:
    """The completed iterations of the states that :func:`find_parts` finds there; None if nothing says it.

    Args:
        url: as there. The folder around a single part says it.
    """
    for place in (url.rstrip("/"), url.rstrip("/").rpartition("/")[0] or "."):
        store = ReadOnlyStore(place, patience_s=10.0)
        with store_errors(store):
            for marker in (MARKER, REPLAY_RECORD):
                if (content := read_marker(store, marker, marker)) is not None:
                    return int(content["iteration"])
    return None


def read_part(store: Store, part: SavedPart) -> dict[str, Any]:
    """All tensors and values of a part, by name, verified by the list of its files.

    Raises:
        DamagedCheckpointError: it is not what was written, or has no such list.
    """
    if not part.digest:
        part = replace(part, digest=digest_of_manifest(store, part.path))
    return CheckpointFolder(store).reader(part).read()


def differences(one: Mapping[str, Any], other: Mapping[str, Any], *, of_replica: bool = False) -> list[str]:
    """The names of all tensors and values that differ in a bit, in type, or in shape, or that one lacks.

    Digests are left out: a session that verifies nothing saves none, and they follow from the tensors. So are
    the script's variables, which may be times and paths, and the name of the run.

    Args:
        one: a state.
        other: another one.
        of_replica: the other one was saved by a replica, which draws random numbers of its own.
    """
    skipped = (_DIGESTS, VARIABLES, *OF_ONE_RUN, *((RANDOM,) if of_replica else ()))

    def compared(state: Mapping[str, Any]) -> dict[str, str]:
        found = digests_in(state).items()
        return {name: own for name, own in found if not is_in(name, skipped)}

    return differing(compared(one), compared(other))


def digests_in(state: Mapping[str, Any]) -> dict[str, str]:
    """A digest of each tensor and value of a state, by name. What DCP stores as bytes is opened."""

    def opened(value: Any) -> Any:
        return unpack(value.getvalue()) if isinstance(value, io.BytesIO) else value

    return digests(leaf for name, value in state.items() for leaf in leaves(opened(value), name))
