"""The files of a part, opened for DCP if all their bytes are those that were written.

Private part used (tested on torch 2.11 to 2.14): ``create_stream`` of
``torch.distributed.checkpoint._fsspec_filesystem.FileSystem``.
"""

from __future__ import annotations

import io
import os
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Protocol

from swift_ft.errors import DamagedCheckpointError
from swift_ft.storage.digest import FileDigest, digest_of_file
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.store_files import StoreFiles


class NearFiles(Protocol):
    """Copies of files that are nearer than the store."""

    def nearer(self, path: str, expected: FileDigest | None) -> IO[bytes] | None:
        """A copy of a file of the store, at its beginning; None if there is none that is whole."""

    def from_store(self, size: int) -> None:
        """Called with the size of each file that is read from the store after all."""


class VerifiedFiles(StoreFiles):
    """Opens a file only if all its bytes are those that were written.

    A local file is read twice, the second time from the page cache. A file behind a network is read once,
    into memory.

    Args:
        store: where.
        part: the part's place there.
        digests: by name, what each file has to be.
        near: copies that are asked for first.
    """

    def __init__(
        self, store: Store, part: str, digests: Mapping[str, FileDigest], near: NearFiles | None
    ) -> None:
        super().__init__(store)
        self._part = part
        self._near = near
        self._digests = digests
        self._in_memory = store.remote

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A file at its beginning. Raises DamagedCheckpointError if it is not what was written."""
        name = posixpath.basename(path)
        expected = self._digests.get(name)
        if (
            self._near is not None
            and (copy := self._near.nearer(f"{self._part}/{name}", expected)) is not None
        ):
            with copy:
                yield copy
            return
        with super().create_stream(path, mode) as stream:
            file: Any = io.BytesIO(stream.read()) if self._in_memory else stream
            check_digest(name, found := digest_of_file(file), expected)
            if self._near is not None:
                self._near.from_store(found.size)
            file.seek(0)
            yield file


def check_digest(name: str, found: FileDigest, expected: FileDigest | None) -> None:
    """Compare a file of a part with what it has to be; None if the part was written without it.

    Raises:
        DamagedCheckpointError: they differ.
    """
    if expected is None:
        raise DamagedCheckpointError(f"the file {name} was not written with it", file=name)
    if found.size != expected.size:
        raise DamagedCheckpointError(
            f"the file {name} has {found.size} bytes instead of {expected.size}", file=name
        )
    if found != expected:
        raise DamagedCheckpointError(f"the file {name} does not match its digest", file=name)
