"""Files that the program has open for writing."""

from __future__ import annotations

import contextlib
import gc
import io


def flush_open_files() -> None:
    """Have the kernel take what the program has written: this process may end without its next line."""
    for found in gc.get_objects():
        # By type: `isinstance` asks an object for its class, and proxies then do all kinds of things.
        if issubclass(type(found), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(OSError, ValueError):  # it is closed, or its other end is gone
                found.flush()
