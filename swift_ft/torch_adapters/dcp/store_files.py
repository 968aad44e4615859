"""DCP's files through the client that a store has already.

DCP would make one for each thread, which fsspec then keeps: it would hold the credentials of that moment, and
whoever renews the store's would not reach it.

Private part used (tested on torch 2.11 to 2.14):
``torch.distributed.checkpoint._fsspec_filesystem.FileSystem``, with its ``fs`` and ``init_path``.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

from swift_ft.storage.store import Store


class StoreFiles(FileSystem):
    """DCP's interface to the files of a store.

    Args:
        store: all calls go through its own filesystem, from whichever thread.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.fs = store.files.fs
        self.fs.invalidate_cache()  # another process may have written there since it was listed

    def init_path(self, path: str | os.PathLike[str], **_: Any) -> str | os.PathLike[str]:
        """The path as it is: there is nothing to be connected to."""
        return path
