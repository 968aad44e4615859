"""One door to everything persistent: a small facade over fsspec.

All paths are relative to the store's URL. What has not been committed does not exist: content is written
under a temporary name (``NAME.RANDOM.tmp``) and renamed when it is complete.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from swift_ft.errors import StoreNotWritableError, SwiftError, UsageError
from swift_ft.logging.files import Files, LocalFiles
from swift_ft.logging.hdfs import hdfs_class
from swift_ft.logging.remote import remote_files
from swift_ft.logging.retry import patiently

__all__ = ["PendingFile", "Store"]

TEMPORARY_SUFFIX = ".tmp"
_WRITE_BUFFER_BYTES = 1 << 16
_RESERVED_BYTES = 8 << 20
_PROBE_PATIENCE_S = 10.0  # a user who mistyped a URL should not wait for long

T = TypeVar("T")


class PendingFile:
    """A file that does not exist until :meth:`commit`. As a context manager it commits, or aborts on an
    exception.

    Attributes:
        sink: the open file as pyarrow knows it, for writers that want to avoid Python per write.
    """

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        self._size = self._reserved = 0
        self._temporary = store._temporary_name(path)
        full = store._absolute(self._temporary)
        store._make_parent(full)
        raw = store._patiently(lambda: store._files.open_sink(full))
        self.sink: pa.NativeFile = pa.BufferedOutputStream(raw, _WRITE_BUFFER_BYTES)

    @property
    def closed(self) -> bool:
        """True after commit and abort."""
        return bool(self.sink.closed)

    def writable(self) -> bool:
        """True until commit or abort."""
        return not self.closed

    def write(self, data: Any) -> int:
        """Appends bytes; returns how many."""
        self.sink.write(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return int(self.sink.tell()) if not self.closed else self._size

    def reserve(self, size: int) -> None:
        """Takes room on the disk for ``size`` further bytes, where the store can do that.

        Raises:
            OSError: there is no room.
        """
        needed = self.tell() + size
        if needed <= self._reserved:
            return
        full = self._store._absolute(self._temporary)
        # In large steps, but on a disk that is nearly full only what is needed.
        step = max(needed, self._reserved + _RESERVED_BYTES)
        try:
            took = self._store._files.reserve(full, step)
        except OSError:
            step = needed
            took = self._store._files.reserve(full, step)
        self._reserved = step if took else 0

    def flush(self) -> None:
        """Hands what is buffered to the filesystem."""
        self.sink.flush()

    def commit(self, path: str | None = None) -> str:
        """Closes the file and gives it its name, atomically.

        Args:
            path: the name, where it was not yet known at opening; must be in the same directory.

        Returns:
            The path of the committed file.
        """
        self._size = self.tell()  # of an earlier attempt, if it is closed
        self.sink.close()
        path = path or self._path
        if self._reserved > self._size:
            self._store._files.trim(self._store._absolute(self._temporary), self._size)
        source, destination = self._store._absolute(self._temporary), self._store._absolute(path)
        self._store._patiently(lambda: self._store._files.rename(source, destination))
        return path

    def abort(self) -> None:
        """Closes and removes what was written. Without effect after a commit."""
        try:
            if not self.closed:
                self.sink.close()
        finally:
            self._store.delete(self._temporary)

    def __enter__(self) -> PendingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self.closed:
            self.commit()


class Store:
    """A directory somewhere: a plain path, ``file://``, ``memory://`` (one process only), or what fsspec
    knows.

    Args:
        url: where. Credentials in it are used, but never shown; better leave them to the places where the
            store's own tools look for them (``~/.aws``, ``AWS_*``, ``HADOOP_CONF_DIR``).
        patience_s: how long an operation on a store behind a network is tried again while that does not
            answer.

    Raises:
        StoreNotWritableError: nothing installed here can open such a URL.
    """

    def __init__(self, url: str | os.PathLike[str], *, patience_s: float = 60.0) -> None:
        self._given = os.fspath(url)
        found = re.search(r"://([^/@]*:[^/]*@)", self._given)
        self._credentials = found[1] if found else ""
        if self._given.startswith("hdfs:"):
            hdfs_class()
        try:
            self._fs, root = fsspec.core.url_to_fs(self._given)
        except Exception as error:
            raise self._not_writable(error) from error
        self._root: str = root.rstrip("/")
        local = isinstance(self._fs, LocalFileSystem)
        if local:
            self._given = f"file://{self._root}"
        self._files: Files = LocalFiles(self._fs) if local else remote_files(self._fs)
        self._patience_s = patience_s if self.remote else 0.0

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def url(self) -> str:
        """The store's URL without credentials, for people to read."""
        return self.shown(self._given)

    def shown(self, what: object) -> str:
        """An error, or whatever else is told to people, without the credentials of the store's URL."""
        return str(what).replace(self._credentials, "")

    @property
    def remote(self) -> bool:
        """True for a store behind a network: a file is brought to this machine before it is read."""
        return self._files.fetched

    @property
    def patience_s(self) -> float:
        """How long an operation is tried again while the store does not answer; 0 for one of this machine."""
        return self._patience_s

    def child_url(self, path: str) -> str:
        """The full URL of a path inside, credentials included, for another library's fsspec."""
        scheme, _, rest = self._given.partition("://")
        return f"{scheme}://{rest.rstrip('/')}/{_checked(path)}" if rest.strip("/") else f"{scheme}://{path}"

    def probe(self, patience_s: float = _PROBE_PATIENCE_S) -> None:
        """Writes, reads and deletes a small file.

        Args:
            patience_s: how long at most that is tried again.

        Raises:
            StoreNotWritableError: one of them failed; the message says why and what to do.
        """
        path = self._temporary_name("probe")
        token = path.encode()

        def try_all() -> bytes:
            full = self._absolute(path)
            self._files.make_parent(full)
            self._fs.pipe_file(full, token)
            back = bytes(self._fs.cat_file(full))
            self._fs.rm_file(full)
            return back

        try:
            with self._tidy(self._absolute(path)):
                back = patiently(try_all, min(self._patience_s, patience_s))
        except Exception as error:
            raise self._not_writable(error) from error
        if back != token:
            raise self._not_writable(OSError("a file read back is not the one that was written"))

    def exists(self, path: str) -> bool:
        """True if there is a file or a directory of that name."""
        return self._patiently(lambda: self._fresh.exists(self._absolute(path)))

    def size(self, path: str) -> int:
        """Bytes in a file. Raises FileNotFoundError if it is absent."""
        return self._patiently(lambda: int(self._fresh.fs.size(self._absolute(path))))

    def list(self, directory: str) -> list[str]:
        """Sorted names in a directory, temporary files included; none if it is absent."""
        try:
            return sorted(self._patiently(lambda: self._fresh.list(self._absolute(directory))))
        except FileNotFoundError:
            return []

    def delete(self, path: str, recursive: bool = False) -> None:
        """Deletes a file, or with ``recursive`` a directory. What is absent is fine."""
        full = self._absolute(path)

        def remove() -> None:
            if recursive:
                self._fresh.fs.rm(full, recursive=True)
            else:
                self._fresh.fs.rm_file(full)

        with contextlib.suppress(FileNotFoundError):
            self._patiently(remove)
        if recursive:
            self.abort_uploads(path)

    def delete_all(self) -> None:
        """Empties the store.

        Raises:
            UsageError: the store is a whole filesystem or a home directory.
        """
        if self._root in ("", os.path.expanduser("~")):  # noqa: PTH111 (the string is what is compared)
            raise UsageError(f"{self.url} will not be emptied: give the run a directory of its own")
        for name in self.list(""):
            self.delete(name, recursive=True)
        self.abort_uploads("")

    def sweep(self, directory: str) -> builtins.list[str]:
        """Deletes what dead writers left in a directory; returns the names of their temporary files."""
        leftovers = [name for name in self.list(directory) if name.endswith(TEMPORARY_SUFFIX)]
        for name in leftovers:
            self.delete(f"{directory}/{name}" if directory else name)
        self.abort_uploads(directory)
        return leftovers

    def abort_uploads(self, directory: str) -> None:
        """Lets go of what dead writers have sent in parts below a directory, and no listing shows.

        Where that is not permitted, it is left to the bucket's own rules.
        """
        with contextlib.suppress(PermissionError):
            self._patiently(lambda: self._files.abandoned(self._absolute(directory)))

    def read_json(self, path: str) -> dict[str, Any] | None:
        """The content of a JSON file; None if it is absent. Raises SwiftError if it is not a JSON object."""
        full = self._absolute(path)
        try:
            data = self._patiently(lambda: self._fs.cat_file(full))
        except FileNotFoundError:
            return None
        try:
            content = json.loads(data)
        except ValueError as error:
            raise SwiftError(f"{self.url}/{path} is not JSON: {error}", path=path) from error
        if not isinstance(content, dict):
            raise SwiftError(f"{self.url}/{path} holds {type(content).__name__}, not an object", path=path)
        return content

    def write_json(self, path: str, content: dict[str, Any]) -> None:
        """Writes or replaces a JSON file atomically and durably."""
        temporary, full = self._absolute(self._temporary_name(path)), self._absolute(path)
        self._make_parent(full)
        with self._tidy(temporary):
            self._patiently(lambda: self._files.put(temporary, full, _encoded(content)))

    def create_json(self, path: str, content: dict[str, Any]) -> bool:
        """Writes a JSON file that must not exist yet; of several writers exactly one gets True."""
        temporary, full = self._absolute(self._temporary_name(path)), self._absolute(path)
        self._make_parent(full)
        with self._tidy(temporary):
            self._patiently(lambda: self._files.stage(temporary, _encoded(content)))
            try:
                self._patiently(lambda: self._files.create(temporary, full, _encoded(content)))
            except FileExistsError:
                return False
        return True

    def open_write(self, path: str) -> PendingFile:
        """Opens a file for writing that appears under its name at ``commit()``."""
        return PendingFile(self, path)

    def open_read(self, path: str) -> pa.NativeFile:
        """Opens a committed file: a memory map of a local one. Raises FileNotFoundError if it is absent."""
        full = self._absolute(path)
        return self._patiently(lambda: self._files.open_source(full))

    def upload(self, local: Path, path: str) -> None:
        """Copies a file of this machine into the store, where it appears when it is complete."""
        temporary, full = self._absolute(self._temporary_name(path)), self._absolute(path)
        self._make_parent(full)
        with self._tidy(temporary):
            self._patiently(lambda: self._files.upload(local, temporary, full))

    def _temporary_name(self, path: str) -> str:
        return f"{path}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"

    def _absolute(self, path: str) -> str:
        return f"{self._root}/{_checked(path)}" if path else self._root

    def _make_parent(self, full: str) -> None:
        self._patiently(lambda: self._files.make_parent(full))

    @contextlib.contextmanager
    def _tidy(self, temporary: str) -> Iterator[None]:
        """Removes a temporary file when its use fails: the attempts to fill a full disk must not fill it."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # tried once: the error that is told is the one above
                self._fs.rm_file(temporary)
            raise

    def _patiently(self, action: Callable[[], T]) -> T:
        return patiently(action, self._patience_s)

    @property
    def _fresh(self) -> Files:
        """The files, of which nothing is known from earlier."""
        self._fs.invalidate_cache()
        return self._files

    def _not_writable(self, error: Exception) -> StoreNotWritableError:
        if isinstance(error, ImportError):
            remedy = "install that package, or choose a file:// URL"
        elif isinstance(error, ValueError):
            remedy = "choose a plain path, file://, or another scheme that fsspec knows"
        else:
            remedy = "choose a directory that this user can write on every machine"
        return StoreNotWritableError(
            f"the store {self.url} cannot be written ({type(error).__name__}: {self.shown(error)}): {remedy}",
            url=self.url,
        )


def _checked(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise UsageError(f"{path!r} leaves the store: paths are relative to its URL")
    return path


def _encoded(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
