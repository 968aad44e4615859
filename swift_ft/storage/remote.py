"""Files behind a network: object stores that speak S3, HDFS, and all else that fsspec supports.

Any call may be repeated: a lost response looks like a failure. :class:`swift_ft.storage.store.Store` does the
retries, not these classes.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pyarrow as pa
from fsspec.asyn import sync

from swift_ft.config.extensions import Extensions, load_once
from swift_ft.errors import UsageError
from swift_ft.storage.files import Files
from swift_ft.storage.hdfs import hdfs_class
from swift_ft.storage.local_source import LocalSource

_SMALL_BYTES = 1 << 20
_PART_BYTES = 8 << 20  # of an upload; a part is sent again when its connection breaks
_PARTS_AT_ONCE = 4


_logger = logging.getLogger(__name__)

_CONNECTING_S = 1.0
"""s3fs connects once more by itself, too: for a moment it has new keys, and its calls go out with the old."""

_lock = threading.Lock()


class _Refusals(threading.local):
    """The connection that last refused a call of this thread, for each client, and since when."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Any, tuple[Any, float]] = weakref.WeakKeyDictionary()


_refusals = _Refusals()


_registered: dict[str, type[Files]] = {}


def register_store(protocol: str, files: type[Files]) -> None:
    """Makes a class responsible for the files of a store of your own, where it differs from others.

    Whatever fsspec opens is a store already, by :class:`RemoteFiles`. One whose rename or errors
    differ gets a subclass. ``swift_ft.testing.StoreConformanceTests`` says whether it keeps its promises. A
    package brings it with an entry point of the group ``swift_ft.stores`` that names a function
    without arguments which calls this one.

    Args:
        protocol: of the URL, as fsspec calls it: ``"myfs"`` for ``myfs://...``.
        files: a subclass of :class:`Files`; it is made with fsspec's filesystem.

    Raises:
        UsageError: ``files`` is not such a class.
    """
    if not (isinstance(files, type) and issubclass(files, Files)):
        raise UsageError(f"register_store() takes a subclass of swift_ft.extend.Files, not {files!r}.")
    _registered[protocol] = files


def remote_files(fs: Any) -> Files:
    """The class that knows a filesystem's peculiarities.

    Raises:
        UsageError: what an installed package brings for stores cannot be loaded.
    """
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    load_once(Extensions.STORES)
    for protocol in protocols & _registered.keys():
        return _registered[protocol](fs)
    if "memory" in protocols:
        return Files(fs)
    if "s3" in protocols:
        return S3Files(fs)
    native = hdfs_class()
    return HdfsFiles(fs) if native is not None and isinstance(fs, native) else RemoteFiles(fs)


class RemoteFiles(Files):
    """A filesystem behind a network, without known peculiarities."""

    needs_download = True

    def open_source(self, path: str) -> pa.NativeFile:
        """Downloads a file and maps it. The copy has no name, so that a crash leaves nothing behind."""
        if self.fs.size(path) <= _SMALL_BYTES:
            return pa.BufferReader(self.fs.cat_file(path))
        with tempfile.NamedTemporaryFile(prefix="swift-ft-") as copy:
            self.fs.get_file(path, copy.name)
            return LocalSource(copy.name)


class S3Files(RemoteFiles):
    """An object store: no directories, no rename, and an object is visible once it is complete."""

    def renew(self) -> bool:
        """Keys are replaced from time to time, and a run outlasts that."""
        return take_new_keys(self.fs)

    def make_root(self, path: str, *, create: bool) -> None:
        """Buckets are created on request only: a mistyped name would make one, for which somebody pays."""
        bucket = path.partition("/")[0]
        try:
            self.fs.call_s3("head_bucket", Bucket=bucket)
        except FileNotFoundError:
            if not create:
                raise FileNotFoundError(
                    f"there is no bucket {bucket}: create it, or add ?create=true to the URL"
                ) from None
            with contextlib.suppress(FileExistsError):  # another worker did
                self.fs.call_s3("create_bucket", Bucket=bucket)
        except PermissionError:  # to look at it; the write will show whether that is needed
            return

    def make_parent(self, path: str) -> None:
        """Does nothing: there are no directories, and buckets are not created here."""

    def upload(self, local: Path, temporary: str, path: str) -> None:
        """Uploads several parts in parallel."""
        self.fs.put_file(str(local), path, chunksize=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def put(self, temporary: str, path: str, data: bytes) -> None:
        """One request, which is atomic."""
        self.fs.pipe_file(path, data)

    def exists(self, path: str) -> bool:
        """True if there is such an object, or one below. Raises what the look raised: see :class:`Files`."""
        # Not by `fs.isfile()`: fsspec's own takes each error for absence.
        with contextlib.suppress(FileNotFoundError):
            if self.fs.info(path)["type"] == "file":
                return True
        return bool(self.list(path))

    def list(self, directory: str) -> list[str]:
        """First parts of all names below.

        The server's own directories are not used: SeaweedFS keeps empty ones.
        """
        prefix = f"{directory.rstrip('/')}/"
        below = (path for path in self.fs.find(prefix) if path.startswith(prefix))
        return list({path.removeprefix(prefix).partition("/")[0] for path in below})

    def abandoned_uploads(self, directory: str) -> dict[str, int]:
        """Bytes of multipart uploads that were never completed."""
        found = {}
        prefix = f"{self.fs.split_path(directory)[1]}/".lstrip("/")
        for upload in self._uploads(directory):
            with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                parts = self._listed("list_parts", "Parts", ("PartNumberMarker",), **upload)
                found[upload["Key"].removeprefix(prefix)] = sum(int(part["Size"]) for part in parts)
        return found

    def abort_abandoned_uploads(self, directory: str) -> int:
        """Aborts multipart uploads that were never completed."""
        uploads = self._uploads(directory)
        for upload in uploads:
            with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                self.fs.call_s3("abort_multipart_upload", **upload)
        return len(uploads)

    def _uploads(self, directory: str) -> builtins.list[dict[str, str]]:
        bucket, prefix, _ = self.fs.split_path(directory)
        uploads = self._listed(
            "list_multipart_uploads",
            "Uploads",
            ("KeyMarker", "UploadIdMarker"),
            Bucket=bucket,
            Prefix=f"{prefix}/" if prefix else "",
        )
        return [{"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]} for one in uploads]

    def _listed(
        self, operation: str, entries: str, markers: tuple[str, ...], **options: str
    ) -> builtins.list[dict[str, Any]]:
        """All pages of a listing, each of which has a thousand entries at most.

        Args:
            operation: the call.
            entries: the field of a page with its entries.
            markers: fields by which a call says where its page begins. A page has them with ``Next`` before
                the name, for the next one.
            options: other fields of each call.
        """
        found: builtins.list[dict[str, Any]] = []
        begins: dict[str, Any] = {}
        while True:
            page = self.fs.call_s3(operation, **options, **begins)
            found += page.get(entries, [])
            following = {marker: page[f"Next{marker}"] for marker in markers if page.get(f"Next{marker}")}
            # A server that tells the same page again would never end.
            if not page.get("IsTruncated") or following in ({}, begins):
                return found
            begins = following


class HdfsFiles(RemoteFiles):
    """HDFS: a file is visible while it is written, and renames are atomic."""

    def rename(self, source: str, destination: str) -> None:
        """Replaces the destination in one step."""
        try:
            self.fs.mv(source, destination, overwrite=True)
        except FileNotFoundError:
            # An earlier call, whose response was lost, may have renamed it.
            if not self.exists(destination):
                raise


# Keys of an S3 store that are replaced while a run goes on, as rotations do: its client has the old ones.
#
# botocore reads `~/.aws/credentials`, and what else has keys, once for each session, which keeps them.


def take_new_keys(fs: Any) -> bool:
    """Let a client of S3 sign with the keys that this machine has now, if they are other ones than it has.

    All of this process that use the store share the client, other libraries included. So it stays the same
    object.

    Args:
        fs: an :class:`s3fs.S3FileSystem`, which has been used.

    Returns:
        Whether a call that was refused may succeed now.
    """
    if fs.anon or fs.key or fs.session is None:  # they are given, and not looked for
        return False
    with _lock:
        session = type(fs.session)(**fs.kwargs)  # as s3fs makes them
        found = _keys(fs, session)
        if found is None or found == _keys(fs, fs.session):
            return _is_in_doubt(fs)
        fs.connect(refresh=True)
    _logger.warning(
        "The store refused this machine's keys, and there are other ones by now: these are used from now on.",
        extra={"event": "store_keys_replaced"},
    )
    return True


def _is_in_doubt(fs: Any) -> bool:
    """Whether a refused call may have gone out with keys that the client no longer has.

    Another thread may have changed them while the call was under way, however long it took. The next call of
    this thread begins later than that: if it is refused by the same connection, these keys are meant.
    """
    now, connection = time.monotonic(), fs.s3
    refused_by, since = _refusals.of.get(fs, (None, now))
    if refused_by is None or refused_by() is not connection:
        _refusals.of[fs] = weakref.ref(connection), now
        return True
    return now - since < _CONNECTING_S


def _keys(fs: Any, session: Any) -> object:
    """The credentials that a session signs with; None if it finds none."""

    async def get() -> object:
        credentials = await session.get_credentials()
        return None if credentials is None else await credentials.get_frozen_credentials()

    return sync(fs.loop, get)
