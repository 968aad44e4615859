"""Digests of files: they show whether the bytes that are read are those that were written.

xxh3_128 finds every flipped bit, as a hash of its length can, at the speed of memory. It proves nothing
against somebody who forges a file together with its digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import xxhash

_CHUNK_BYTES = 1 << 20  # stays in a core's cache between the copy and the hash
_SEAL = "digest"


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The expected content of a file.

    Attributes:
        size: in bytes.
        digest: xxh3_128 of its bytes, as 32 hexadecimal digits.
    """

    size: int
    digest: str


class Digester:
    """Computes the digest of a file piece by piece."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._size = 0

    def update(self, data: Any) -> None:
        """Add the next bytes: anything that offers the buffer protocol."""
        self._hash.update(data)
        self._size += memoryview(data).nbytes

    def digest(self) -> FileDigest:
        """Of all bytes so far."""
        return FileDigest(self._size, self._hash.hexdigest())


def digest_of_file(file: IO[bytes]) -> FileDigest:
    """Of the bytes from a file's current position to its end."""
    digester = Digester()
    while chunk := file.read(_CHUNK_BYTES):
        digester.update(chunk)
    return digester.digest()


def digest_of_json(content: Mapping[str, Any]) -> str:
    """Of a JSON object, however it is indented and ordered."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode()))


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its own digest."""
    return {**content, _SEAL: digest_of_json(content)}


def unsealed(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """A JSON object without its own digest; None if it does not match that digest."""
    plain = {name: value for name, value in content.items() if name != _SEAL}
    return plain if content.get(_SEAL) == digest_of_json(plain) else None
