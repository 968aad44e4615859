"""Reasons why a store cannot be used, and the remedies."""

from __future__ import annotations

import errno

from swift_ft.errors import StoreNotWritableError
from swift_ft.storage.retry import is_refusal, remedy
from swift_ft.storage.store_url import StoreUrl


class StoreGoneError(OSError):
    """The folder of a store that was in use is empty or gone, as after a lost mount."""

    def __init__(self, url: str, anchor: str) -> None:
        super().__init__(errno.ESTALE, f"the folder is gone, or is another one: {anchor} is missing", url)


def not_writable(url: StoreUrl, error: Exception, waited_s: float = 0.0) -> StoreNotWritableError:
    """The error for people, with what to do.

    Args:
        url: the store's.
        error: what its client raised.
        waited_s: how long the store was waited for.
    """
    if isinstance(error, ImportError):
        remedied = "install that package, or choose a file:// URL"
    elif isinstance(error, ValueError):
        remedied = "choose a plain path, file://, or another scheme that fsspec knows"
    elif waited_s:
        remedied = f"{remedy(error) or 'repair it'}, and continue with --resume"
    elif _lacks_access(url, error):
        remedied = (
            "check the credentials that this machine has for it (for S3: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials), and that they may write there"
        )
    elif remedy(error) and not isinstance(error, PermissionError):
        remedied = f"{remedy(error)}, or choose another directory"
    else:
        remedied = "choose a directory that this user can write on every machine"
    cause = f"{type(error).__name__}: {url.redacted(error)}"
    waited = f", and could not be for {waited_s:g} s" if waited_s else ""
    return StoreNotWritableError(
        f"the store {url} cannot be written ({cause}){waited}: {remedied}",
        url=str(url),
    )


def _lacks_access(url: StoreUrl, error: Exception) -> bool:
    """Whether a server refuses who asks: no directory of this user would help."""
    remote = "://" in url.full and not url.full.startswith(("file://", "local://"))
    return remote and is_refusal(error)
