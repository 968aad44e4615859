"""The index of a folder of sample files, written once: samples per file, and digests.

URL/samples.json
    {"version": 1, "sample_bytes": null,
     "files": {"part-00.jsonl": {"samples": 1000, "size": 83210, "digest": "5f0c..."}, ...}, "digest": "..."}

The index makes the order of all samples known before the first file is read, tells one data set from another,
and lets a copy of a file on a disk or another machine be used without trusting it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swift_ft.errors import UsageError
from swift_ft.storage.digest import Digester, FileDigest, digest_of_json, sealed, unsealed
from swift_ft.storage.store import Store

INDEX = "samples.json"

_VERSION = 1
NEWLINE = ord("\n")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of samples.

    Attributes:
        path: in the folder.
        samples: how many.
        content: what its bytes have to be.
    """

    path: str
    samples: int
    content: FileDigest


@dataclass(frozen=True, slots=True)
class FileIndex:
    """All files of a data set.

    Attributes:
        files: in the order of their paths.
        sample_bytes: of each sample; None if each is a line.
        digest: over the whole index.
    """

    files: tuple[DataFile, ...]
    sample_bytes: int | None
    digest: str


def write_index(url: str, *, sample_bytes: int | None = None) -> FileIndex:
    """Read all files below a folder once, and write its index there. Do so before the first training.

    Args:
        url: of the folder: a path, or what fsspec opens, such as ``s3://bucket/tokens``.
        sample_bytes: of each sample, for files of samples of one size. Without it each line is a sample.

    Raises:
        UsageError: if there is no file, or a file does not hold a whole number of samples.
        OSError: if the folder cannot be read or written.
    """
    store = Store(url)
    names = sorted(name for name in store.find("") if not _hidden(name) and name != INDEX)
    if not names:
        raise UsageError(f"There is no file of samples in {store.url}.")
    files = [_read(store, name, sample_bytes) for name in names]
    listed = {
        file.path: {"samples": file.samples, "size": file.content.size, "digest": file.content.digest}
        for file in files
    }
    content = {"version": _VERSION, "sample_bytes": sample_bytes, "files": listed}
    store.write_json(INDEX, sealed(content))
    return FileIndex(tuple(files), sample_bytes, digest_of_json(content))


def read_index(store: Store) -> FileIndex:
    """The index of a folder.

    Raises:
        UsageError: if there is none, or one of an unknown version, or it is damaged.
    """
    written = store.read_json(INDEX)
    if written is None:
        raise UsageError(
            f"{store.url} has no {INDEX}: call swift_ft.data.write_index({store.url!r}) once, before the "
            "training."
        )
    content = unsealed(written)
    if content is None or content.get("version") != _VERSION:
        raise UsageError(
            f"{INDEX} in {store.url} is damaged, or of another version: delete it, and call "
            "swift_ft.data.write_index() again."
        )
    files = [
        DataFile(path, said["samples"], FileDigest(said["size"], said["digest"]))
        for path, said in sorted(content["files"].items())
    ]
    return FileIndex(tuple(files), content["sample_bytes"], digest_of_json(content))


def _hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _read(store: Store, name: str, sample_bytes: int | None) -> DataFile:
    digester, lines, last = Digester(), 0, NEWLINE
    for piece in store.read_pieces(name):
        digester.update(piece)
        if sample_bytes is None and len(piece):
            lines += int(np.count_nonzero(np.frombuffer(piece, np.uint8) == NEWLINE))
            last = piece[-1]
    content = digester.digest()
    if sample_bytes is None:
        samples = lines + (last != NEWLINE)  # the last line may have no end
    else:
        samples, rest = divmod(content.size, sample_bytes)
        if rest:
            raise UsageError(
                f"{name} in {store.url} has {content.size} bytes, which is no whole number of samples of "
                f"{sample_bytes}: its end is missing, or sample_bytes= is wrong."
            )
    if not samples:
        raise UsageError(f"{name} in {store.url} has no sample: remove it.")
    return DataFile(name, samples, content)
