"""Frames: a length, a tag, and a body; nothing is kept of a frame that announces too much.

    length (4 bytes, big endian, of all that follows) | tag (16 bytes) | body

The tag is the beginning of an HMAC-SHA256 over the frame's number and its body, with a key of this connection
and this direction. So a frame that is changed, repeated, omitted or moved is detected. The frames
of the handshake have no tag yet.
"""

from __future__ import annotations

import hmac
import struct

from swift_ft.network.errors import BadFrameError

MAX_FRAME_BYTES = 64 << 20
"""The longest frame of a member of the job: a snapshot of a large job's state."""

_LENGTH = struct.Struct("!I")
_TAG_BYTES = 16


def frame(payload: bytes) -> bytes:
    """A payload behind its length.

    Raises:
        BadFrameError: it is too long for the other side.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise BadFrameError(f"a message of {len(payload)} bytes is too long: {MAX_FRAME_BYTES} at most")
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Cuts a stream of bytes into frames.

    Args:
        limit: the longest payload. It is checked before any of it is kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def feed(self, data: bytes) -> None:
        """Add what came."""
        self._bytes += data

    def missing(self) -> int:
        """The number of missing bytes of the next frame, as far as that is known."""
        if len(self._bytes) < _LENGTH.size:
            return _LENGTH.size - len(self._bytes)
        (length,) = _LENGTH.unpack_from(self._bytes)
        return int(_LENGTH.size + length - len(self._bytes))

    def next(self) -> bytes | None:
        """The next payload; None while it is incomplete.

        Raises:
            BadFrameError: it is longer than the limit, or not even that: these are other bytes.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self.limit:
            raise BadFrameError(f"a frame of {length} bytes, {self.limit} at most")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        payload = bytes(memoryview(self._bytes)[_LENGTH.size : end])
        del self._bytes[:end]
        return payload


class Sealer:
    """Makes the frames of one direction of a connection.

    Args:
        key: this direction's.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, body: bytes) -> bytes:
        """The next frame.

        Raises:
            BadFrameError: the body is too long. The next frame takes its number.
        """
        sealed = frame(_tag(self._key, self._number, body) + body)
        self._number += 1
        return sealed


class Opener:
    """Checks the frames of one direction of a connection.

    Args:
        key: this direction's.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def open(self, payload: bytes) -> bytes:
        """The body of the next frame.

        Raises:
            BadFrameError: this is not the next frame that the other side made.
        """
        tag, body = payload[:_TAG_BYTES], payload[_TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(self._key, self._number, body)):
            raise BadFrameError("a frame that was changed, repeated, or is out of order")
        self._number += 1
        return body


def _tag(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")[:_TAG_BYTES]
