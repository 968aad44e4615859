"""Keys of an S3 store that are replaced while a run goes on, as rotations do: its client has the old ones.

botocore reads `~/.aws/credentials`, and what else has keys, once for each session, which keeps them.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

from fsspec.asyn import sync

_logger = logging.getLogger(__name__)

_BEGAN_BEFORE_S = 10.0
"""A call that is refused so soon after the change may have begun with the old keys, in another thread."""

_IN_DOUBT_S = 1.0
"""s3fs takes new keys by itself where it connects once more. A call of before is refused all the same."""

_lock = threading.Lock()
_changed_at: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()  # by client
_refused: weakref.WeakKeyDictionary[Any, tuple[float, float]] = weakref.WeakKeyDictionary()  # first and last


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
            recently = time.monotonic() - _changed_at.get(fs, -_BEGAN_BEFORE_S) < _BEGAN_BEFORE_S
            return recently or _is_in_doubt(fs)
        fs.connect(refresh=True)
        _changed_at[fs] = time.monotonic()
    _logger.warning(
        "The store refused this machine's keys, and there are other ones by now: these are used from now on.",
        extra={"event": "store_keys_replaced"},
    )
    return True


def _is_in_doubt(fs: Any) -> bool:
    """Whether a client has been refused for so short a time that an old call may be the reason."""
    now = time.monotonic()
    first, last = _refused.get(fs, (now, now))
    if now - last > _BEGAN_BEFORE_S:
        first = now
    _refused[fs] = first, now
    return now - first < _IN_DOUBT_S


def _keys(fs: Any, session: Any) -> object:
    """What a session signs with; None if it finds none."""

    async def get() -> object:
        credentials = await session.get_credentials()
        return None if credentials is None else await credentials.get_frozen_credentials()

    return sync(fs.loop, get)
