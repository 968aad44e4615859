"""Messages as bytes: an object in JSON, and behind it one long text as it is.

A block of the journal is a text of JSON itself. As a string of a message it was escaped and read again at
each hop, which cost more than all else of a hop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

TEXT = "text"
"""The key under which a message has its long text, if it has one."""

_END = b"\n"  # of the object: compact JSON has none


def encoded(message: Mapping[str, Any]) -> bytes:
    """A message as bytes: JSON-ready, but for :data:`TEXT`, which is a string."""
    if TEXT not in message:
        return json.dumps(message, separators=(",", ":")).encode()
    rest = {key: value for key, value in message.items() if key != TEXT}
    text: str = message[TEXT]
    return json.dumps(rest, separators=(",", ":")).encode() + _END + text.encode()


def decoded(data: bytes) -> dict[str, Any]:
    """The inverse of :func:`encoded`.

    Raises:
        ValueError: if the bytes are not a message.
        RecursionError: the same.
    """
    head, mark, text = data.partition(_END)
    message = json.loads(head)
    if type(message) is not dict:
        raise ValueError("a message that is no object")
    if mark:
        message[TEXT] = text.decode()
    return message
