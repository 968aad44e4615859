"""JSON files of a store that have their own digest: whole, or said to be damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swift_ft.errors import SwiftError
from swift_ft.storage.digest import unsealed
from swift_ft.storage.store import Store

GONE = "is gone"
NO_JSON = "is no JSON object"
OTHER_DIGEST = "does not match its digest"


def read_whole(
    store: Store, path: str, is_unsealed: Callable[[Mapping[str, Any]], bool] | None = None
) -> tuple[dict[str, Any] | None, str]:
    """The content of a file without its digest; else what is wrong with it.

    Args:
        store: where it is.
        path: in the store.
        is_unsealed: says of a content that it has no digest of its own, and needs none.

    Returns:
        A content and an empty text; or None and `GONE`, `NO_JSON` or `OTHER_DIGEST`.

    Raises:
        Exception: what the store's client raised.
    """
    try:
        content = store.read_json(path)
    except SwiftError:
        return None, NO_JSON
    if content is None:
        return None, GONE
    if is_unsealed is not None and is_unsealed(content):
        return content, ""
    plain = unsealed(content)
    return plain, "" if plain is not None else OTHER_DIGEST
