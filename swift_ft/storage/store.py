"""The store for everything persistent: a small facade over fsspec.

All paths are relative to the store's URL. What has not been committed does not exist: content is written
under a temporary name (``NAME.RANDOM.tmp``) and renamed when it is complete.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from swift_ft.errors import SwiftError, UsageError
from swift_ft.storage.atomic_file import AtomicFile
from swift_ft.storage.files import FileFacts, Files, LocalFiles
from swift_ft.storage.hdfs import hdfs_class
from swift_ft.storage.remote import remote_files
from swift_ft.storage.retry import is_outage, is_refusal, is_transient, remedy, retry
from swift_ft.storage.store_errors import StoreGoneError, not_writable
from swift_ft.storage.store_url import StoreUrl

_logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".tmp"
_VANISHES = 2
"""So often, at most, does a faster worker delete a probe's file, while it tidies or empties the store."""
_PIECE_BYTES = 8 << 20
PATIENCE_S = 60.0
"""The time for which an operation is retried as a rule."""
_PROBE_PATIENCE_S = 10.0  # a user who mistyped a URL should not wait for long
_BETWEEN_WARNINGS_S = 30.0

T = TypeVar("T")


class Store:
    """A directory somewhere: a plain path, ``file://``, ``memory://`` (one process only), or what fsspec
    supports.

    Args:
        url: its URL. Credentials in it are used, but never shown. Prefer the places where the store's own
            tools look for them (``~/.aws``, ``AWS_*``, ``HADOOP_CONF_DIR``). A missing bucket is created if
            the URL ends with ``?create=true``.
        patience_s: how long an operation is retried while a store behind a network does not answer, or while
            a local one is full, not writable, or gone.

    Raises:
        StoreNotWritableError: nothing installed here can open such a URL.
    """

    def __init__(self, url: str | os.PathLike[str], *, patience_s: float = PATIENCE_S) -> None:
        self._url = StoreUrl.parse(url)
        if self._url.full.startswith("hdfs:"):
            hdfs_class()
        try:
            self._fs, root = fsspec.core.url_to_fs(self._url.full)
        except Exception as error:
            raise not_writable(self._url, error) from error
        self._root: str = root.rstrip("/")
        local = isinstance(self._fs, LocalFileSystem)
        if local:
            self._url = StoreUrl(f"file://{self._root}")
        self._files: Files = LocalFiles(self._fs) if local else remote_files(self._fs)
        self._patience_s = patience_s
        self._anchor = ""
        self._warned_at = -_BETWEEN_WARNINGS_S

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def url(self) -> str:
        """The store's URL without credentials, for people to read."""
        return str(self._url)

    def redacted(self, what: object) -> str:
        """A text for people, such as an error, without the credentials of the store's URL."""
        return self._url.redacted(what)

    @property
    def root(self) -> str:
        """Its place, as its filesystem writes paths."""
        return self._root

    @property
    def files(self) -> Files:
        """The calls by which it talks to its filesystem."""
        return self._files

    @property
    def remote(self) -> bool:
        """True for a store behind a network: a file is downloaded before it is read."""
        return self._files.needs_download

    def local_path(self, path: str) -> Path | None:
        """The path on this machine; None for a store behind a network or in memory."""
        return Path(self._absolute(path)) if isinstance(self._files, LocalFiles) else None

    @property
    def patience_s(self) -> float:
        """The time for which an operation is retried while the store cannot be used."""
        return self._patience_s

    def may_pass(self, error: BaseException) -> bool:
        """Whether an error of this store may pass by itself, or once an administrator has put it right.

        Where a server refused this machine, that is so if there are other credentials by now. They are used
        from then on.
        """
        if is_refusal(error) and self._files.renew():
            return True
        return is_transient(error) if self.remote else is_outage(error)

    def at_once(self) -> Store:
        """The same store without patience, for callers that retry themselves."""
        hasty = copy.copy(self)
        hasty._patience_s = 0.0
        return hasty

    def anchor(self, path: str) -> None:
        """Remember a file that is there as long as the store is: without it, a local folder counts as gone.

        A lost mount leaves an empty folder behind, or none. What is written there goes to another disk.
        """
        self._anchor = "" if self.remote else path

    def check_anchor(self) -> None:
        """Raises StoreGoneError if the store was in use and is gone."""
        if self._anchor and not self._files.exists(self._absolute(self._anchor)):
            raise StoreGoneError(self.url, self._anchor)

    @property
    def has_secret_url(self) -> bool:
        """Whether there are credentials in its URL, which :attr:`url` leaves out."""
        return self._url.has_credentials

    def child_url(self, path: str) -> str:
        """The full URL of a path inside, credentials included, for another library's fsspec."""
        return self._url.child(_checked(path))

    def probe(self, patience_s: float | None = None) -> None:
        """Writes, reads and deletes a small file.

        Args:
            patience_s: how long a store that has been in use is waited for, whatever is wrong with it. None
                for one that may be mistyped: a store behind a network gets a few seconds to answer.

        Raises:
            StoreNotWritableError: an operation failed; the message says why and what to do.
        """
        path = self._temporary_name("probe")
        token = path.encode()

        def try_once() -> bytes:
            full = self._absolute(path)
            self.check_anchor()
            self._files.make_root(self._root, create=self._url.create)
            self._files.make_parent(full)
            self._fs.pipe_file(full, token)
            back = bytes(self._fs.cat_file(full))
            self._fs.rm_file(full)
            return back

        def try_all() -> bytes:
            for _ in range(_VANISHES):
                with contextlib.suppress(FileNotFoundError):
                    return try_once()
            return try_once()

        def may_pass(error: BaseException) -> bool:
            return self.may_pass(error) or (patience_s is not None and is_outage(error))

        if patience_s is None:
            wait_s = min(self._patience_s, _PROBE_PATIENCE_S) if self.remote else 0.0
        else:
            wait_s = patience_s
        try:
            with self._tidy(self._absolute(path)):
                back = retry(try_all, wait_s, may_pass, on_wait=lambda error: self._warn(error, wait_s))
        except Exception as error:
            if wait_s <= 0:
                self.may_pass(error)  # nobody has asked: whoever tries again does so with new credentials
            raise not_writable(self._url, error, waited_s=wait_s if patience_s else 0.0) from error
        if back != token:
            raise not_writable(self._url, OSError("a file read back is not the one that was written"))

    def exists(self, path: str) -> bool:
        """True if there is a file or a directory of that name."""

        def find() -> bool:
            found = self._fresh.exists(self._absolute(path))
            if not found:
                self.check_anchor()
            return found

        return self._retry(find)

    def size(self, path: str) -> int:
        """Bytes in a file. Raises FileNotFoundError if it is absent."""
        return self._retry(lambda: int(self._fresh.fs.size(self._absolute(path))))

    def list(self, directory: str) -> list[str]:
        """Sorted names in a directory, temporary files included; none if it is absent."""
        try:
            return sorted(self._retry(lambda: self._fresh.list(self._absolute(directory))))
        except FileNotFoundError:
            return []

    def find(self, directory: str) -> dict[str, FileFacts]:
        """All files below a directory, by their path in it; none if it is absent."""
        full = self._absolute(directory)
        try:
            return self._retry(lambda: self._fresh.find(full))
        except FileNotFoundError:
            return {}

    def read_pieces(self, path: str, piece_bytes: int = _PIECE_BYTES) -> Iterator[memoryview]:
        """The bytes of a file, piece by piece. No more than one piece is in memory.

        Args:
            piece_bytes: in each piece but the last. Each is valid until the next one is taken.

        Raises:
            FileNotFoundError: if the file is absent.
        """
        full = self._absolute(path)
        if isinstance(self._files, LocalFiles):
            with self._retry(lambda: Path(full).open("rb", buffering=0)) as file:
                yield from self._files.pieces(file, piece_bytes)
            return
        size = self.size(path)
        for begin in range(0, size, piece_bytes):
            end = min(begin + piece_bytes, size)
            yield memoryview(self._retry(functools.partial(self._fs.cat_file, full, start=begin, end=end)))

    def delete(self, path: str, recursive: bool = False) -> None:
        """Deletes a file, or with ``recursive`` a directory. Does nothing if it is absent."""
        full = self._absolute(path)

        def remove() -> None:
            if recursive:
                self._fresh.fs.rm(full, recursive=True)
            else:
                self._fresh.fs.rm_file(full)

        with contextlib.suppress(FileNotFoundError):
            self._retry(remove)
        if recursive:
            self.abort_uploads(path)

    def delete_all(self) -> None:
        """Empties the store.

        Raises:
            UsageError: the store is a whole filesystem or a home directory.
        """
        if self._root in ("", os.path.expanduser("~")):  # noqa: PTH111 (strings are compared)
            raise UsageError(f"{self.url} will not be emptied: give the run a directory of its own")
        for name in self.list(""):
            self.delete(name, recursive=True)
        self.abort_uploads("")

    def sweep(self, directory: str, is_dead: Callable[[str], bool] = lambda name: True) -> builtins.list[str]:
        """Deletes leftovers of dead writers in a directory; returns the names of their temporary files.

        Args:
            directory: where.
            is_dead: whether the writer of a temporary file is. By default no other process may write there.
        """
        leftovers = [name for name in self.temporary_files(directory) if is_dead(name)]
        for name in leftovers:
            self.delete(f"{directory}/{name}" if directory else name)
        self.abort_uploads(directory)
        return leftovers

    def temporary_files(self, directory: str) -> builtins.list[str]:
        """Names in a directory of what is being written, or was when its writer died."""
        return [name for name in self.list(directory) if name.endswith(TEMPORARY_SUFFIX)]

    def abandoned_uploads(self, directory: str) -> dict[str, int]:
        """Bytes of what :meth:`abort_uploads` would abort, by path below the directory."""
        with contextlib.suppress(PermissionError):
            return self._retry(lambda: self._files.abandoned_uploads(self._absolute(directory)))
        return {}

    def abort_uploads(self, directory: str) -> None:
        """Aborts multipart uploads of dead writers below a directory, which no listing shows.

        Where that is not permitted, the bucket's own lifecycle rules must do it.
        """
        with contextlib.suppress(PermissionError):
            self._retry(lambda: self._files.abort_abandoned_uploads(self._absolute(directory)))

    def read_json(self, path: str) -> dict[str, Any] | None:
        """The content of a JSON file; None if it is absent. Raises SwiftError if it is not a JSON object."""
        full = self._absolute(path)
        try:
            data = self._retry(lambda: self._fs.cat_file(full))
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
            self._retry(lambda: self._files.put(temporary, full, _encoded(content)))

    def open_write(self, path: str) -> AtomicFile:
        """Opens a file for writing that appears under its name at ``commit()``."""
        temporary = self._temporary_name(path)
        full = self._absolute(temporary)
        self._make_parent(full)
        return AtomicFile(
            self._files,
            full,
            path,
            absolute=self._absolute,
            retry=self._retry,
            present=self._present,
            remove=lambda: self.delete(temporary),
        )

    def open_read(self, path: str) -> pa.NativeFile:
        """Opens a committed file: a memory map of a local one. Raises FileNotFoundError if it is absent."""
        full = self._absolute(path)
        return self._retry(lambda: self._files.open_source(full))

    def upload(self, local: Path, path: str) -> None:
        """Copies a file of this machine into the store, where it appears when it is complete."""
        temporary, full = self._absolute(self._temporary_name(path)), self._absolute(path)
        self._make_parent(full)
        with self._tidy(temporary):
            self._retry(lambda: self._files.upload(local, temporary, full))

    def _temporary_name(self, path: str) -> str:
        return f"{path}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"

    def _absolute(self, path: str) -> str:
        return f"{self._root}/{_checked(path)}" if path else self._root

    def _make_parent(self, full: str) -> None:
        def make() -> None:
            self.check_anchor()  # never below the place of a lost mount
            self._files.make_parent(full)

        self._retry(make)

    @contextlib.contextmanager
    def _tidy(self, temporary: str) -> Iterator[None]:
        """Removes a temporary file if its use fails, so that repeated attempts do not fill the disk."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # tried once; the caller sees the error above
                self._fs.rm_file(temporary)
            raise

    def _retry(self, action: Callable[[], T]) -> T:
        return retry(
            lambda: self._present(action),
            self._patience_s,
            self.may_pass,
            what=f"the store {self.url} to work again",
            on_wait=self._warn_of_wait,
        )

    def _warn_of_wait(self, error: BaseException) -> None:
        if not (self.remote and is_refusal(error)):  # with other credentials it is tried again at once
            self._warn(error, self._patience_s)

    def _present(self, action: Callable[[], T]) -> T:
        """Tell a file that is absent from a store that is gone."""
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError):
            self.check_anchor()
            raise

    def _warn(self, error: BaseException, wait_s: float) -> None:
        """Say what is waited for, once in a while."""
        now = time.monotonic()
        if wait_s > 0 and now - self._warned_at >= _BETWEEN_WARNINGS_S:
            self._warned_at = now
            what = remedy(error)
            _logger.warning(
                "The store %s cannot be used (%s: %s). It is tried again for %g s%s.",
                self.url,
                type(error).__name__,
                self.redacted(error),
                wait_s,
                f": {what}" if what else "",
                extra={"event": "store_waited_for"},
            )

    @property
    def _fresh(self) -> Files:
        """The files, without cached listings."""
        self._fs.invalidate_cache()
        return self._files


def _checked(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise UsageError(f"{path!r} leaves the store: paths are relative to its URL")
    return path


def _encoded(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
