"""Verifies committed checkpoints on demand, without loading them: in threads, and piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.manifest import MANIFEST, read_manifest
from swift_ft.errors import DamagedCheckpointError
from swift_ft.observe.waits import waiting
from swift_ft.recovery.job_state import SavedPart
from swift_ft.storage.digest import Digester, FileDigest
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.verified_files import check_digest


@dataclass(frozen=True, slots=True)
class CheckedPart:
    """The outcome for one part of a committed checkpoint.

    Attributes:
        path: its place in the store.
        ranks: the workers whose part it is: replicas share one.
        damaged: by file name, what is wrong with it.
    """

    path: str
    ranks: tuple[int, ...]
    damaged: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CheckedCheckpoint:
    """The outcome for a committed checkpoint.

    Attributes:
        marker: what is wrong with the marker, so that the parts are unknown; empty if nothing is.
        parts: by rank of their first worker.
        store_url: where the checkpoint is, for messages.
    """

    iteration: int
    marker: str
    parts: tuple[CheckedPart, ...]
    store_url: str

    @property
    def damaged(self) -> tuple[str, ...]:
        """One line for each file that is not what was saved, or is gone."""
        lines = [
            f"{what} (the part of worker {part.ranks[0]}, {self.store_url}/{part.path})"
            for part in self.parts
            for what in part.damaged.values()
        ]
        return (*([self.marker] if self.marker else []), *lines)

    @property
    def intact(self) -> bool:
        """Whether all its bytes are proven to be those that were saved."""
        return not self.damaged


def verify_checkpoint(
    folder: CheckpointFolder,
    iteration: int,
    *,
    threads: int = 1,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> CheckedCheckpoint:
    """Read all files of a committed checkpoint, and compare them with their digests.

    Args:
        folder: where it is.
        threads: how many files are read at once.
        on_bytes: called with the bytes of each piece that was read, in any of the threads.

    Raises:
        CheckpointError: if there are no checkpoints at all.
        Exception: what the store's client raised, if it does not answer.
    """
    url = folder.store.url
    try:
        parts = folder.parts_of(iteration)
    except DamagedCheckpointError as error:
        return CheckedCheckpoint(iteration, str(error), (), url)
    ranks: dict[SavedPart, list[int]] = {}
    for rank, part in sorted(parts.items()):
        ranks.setdefault(part, []).append(rank)
    with ThreadPoolExecutor(threads, "swift_ft verify") as pool:
        pending = [(part, *_begun(pool, folder.store, part, on_bytes)) for part in ranks]
        checked = [
            CheckedPart(part.path, tuple(ranks[part]), _damaged(part, known, reading))
            for part, known, reading in pending
        ]
    return CheckedCheckpoint(iteration, "", tuple(checked), url)


def part_damages(folder: CheckpointFolder, part: SavedPart) -> list[str]:
    """One line for each file of a part that is not what was saved."""
    with ThreadPoolExecutor(1, "swift_ft verify") as pool:
        return [*_damaged(part, *_begun(pool, folder.store, part, lambda count: None)).values()]


def _begun(
    pool: ThreadPoolExecutor, store: Store, part: SavedPart, on_bytes: Callable[[int], None]
) -> tuple[str, dict[str, Future[str]]]:
    """The damage of a part's list of files, empty if none, and the damage of each file, once it is read."""
    try:
        files = read_manifest(store, part.path, part.digest)
    except DamagedCheckpointError as error:
        return str(error), {}
    return "", {
        name: pool.submit(_damage, store, f"{part.path}/{name}", name, expected, on_bytes)
        for name, expected in files.items()
    }


def _damaged(part: SavedPart, manifest: str, reading: Mapping[str, Future[str]]) -> dict[str, str]:
    with waiting(f"{part.path} to be read"):
        results = {MANIFEST: manifest, **{name: future.result() for name, future in reading.items()}}
    return {name: what for name, what in results.items() if what}


def _damage(store: Store, path: str, name: str, expected: FileDigest, on_bytes: Callable[[int], None]) -> str:
    """The defect of a file; empty if there is none."""
    digester = Digester()
    try:
        for piece in store.read_pieces(path):
            digester.update(piece)
            on_bytes(piece.nbytes)
        check_digest(name, digester.digest(), expected)
    except DamagedCheckpointError as error:
        return str(error)
    except FileNotFoundError:
        store.check_anchor()
        return f"the file {name} is gone"
    except OSError as error:
        if store.remote:  # it does not answer
            raise
        return f"the file {name} cannot be read ({store.redacted(error)})"
    return ""
