"""The proof that a committed checkpoint is the one that was saved: each step vouches for the next.

committed.json                   its own digest, and the digest of each part's list
rank-00001.g00002/digests.json   the list: size and digest of each file of the part
rank-00001.g00002/...            the files, as DCP writes them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from swift_ft.errors import DamagedCheckpointError
from swift_ft.storage.digest import FileDigest, digest_of_json
from swift_ft.storage.sealed_file import GONE, read_whole
from swift_ft.storage.store import Store

MANIFEST = "digests.json"


def write_manifest(store: Store, part: str, files: Mapping[str, FileDigest]) -> str:
    """Write the list of a part's files, once they are durable. Returns the digest of the list."""
    content = {"algorithm": "xxh3_128", "files": {name: asdict(file) for name, file in files.items()}}
    store.write_json(f"{part}/{MANIFEST}", content)
    return digest_of_json(content)


def read_manifest(store: Store, part: str, digest: str) -> dict[str, FileDigest]:
    """The list of a part's files, by name.

    Raises:
        DamagedCheckpointError: if it is gone, or is not the one of that digest.
    """
    content = _content(store, part)
    if digest_of_json(content) != digest:
        raise DamagedCheckpointError(f"the file {MANIFEST} does not match its digest", file=MANIFEST)
    return {name: FileDigest(**file) for name, file in content["files"].items()}


def digest_of_manifest(store: Store, part: str) -> str:
    """The digest of a part's list, which is taken as it is: no marker names the part.

    Raises:
        DamagedCheckpointError: if it is gone.
    """
    return digest_of_json(_content(store, part))


def _content(store: Store, part: str) -> dict[str, Any]:
    content, damage = read_whole(store, f"{part}/{MANIFEST}", lambda _: True)  # its digest is elsewhere
    if content is None:
        raise DamagedCheckpointError(f"the file {MANIFEST} {damage}", file=MANIFEST)
    return content


def read_marker(store: Store, path: str, name: str) -> dict[str, Any] | None:
    """A marker without its own digest; None if it is absent.

    Raises:
        DamagedCheckpointError: if the marker is not what was written.
    """
    marker, damage = read_whole(store, path)
    if damage and damage != GONE:
        raise DamagedCheckpointError(f"the file {name} {damage}", file=name)
    return marker
