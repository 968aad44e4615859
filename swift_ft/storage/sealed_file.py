"""JSON files of a store that have their own digest, and of which a damaged one is as good as none."""

from __future__ import annotations

from typing import Any

from swift_ft.errors import SwiftError
from swift_ft.storage.digest import unsealed
from swift_ft.storage.store import Store


def read_sealed(store: Store, path: str) -> dict[str, Any] | None:
    """The content of a file without its digest. None if there is no whole file.

    Raises:
        Exception: what the store's client raised.
    """
    try:
        content = store.read_json(path)
    except SwiftError:  # it is not JSON
        return None
    return unsealed(content) if content is not None else None
