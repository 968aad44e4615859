"""Retries for stores that are down, slow or overloaded for a while."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import tenacity

from swift_ft.observe.waits import waiting

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
# Waiting does not help: a file is absent or exists already, permission is missing, or the call was wrong.
_PERMANENT = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
)
# botocore's, which need not be installed. Their base class is also that of its transient errors.
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"})
_PERMANENT_NAMES = _NO_CREDENTIALS | {"ParamValidationError"}

# What an administrator can put right while a job waits, and how.
_REMEDIES = {
    "make room there": (errno.ENOSPC, errno.EDQUOT),
    "give this user the permission to write there": (errno.EACCES, errno.EPERM),
    "make its filesystem writable again": (errno.EROFS,),
    "mount it again": (errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.EHOSTDOWN, errno.ETIMEDOUT),
    "check the disk": (errno.EIO, errno.EREMOTEIO),
    "take load off it": (errno.EBUSY, errno.EAGAIN),
}
_OUTAGES = {number: remedy for remedy, numbers in _REMEDIES.items() for number in numbers}

T = TypeVar("T")


def is_transient(error: BaseException) -> bool:
    """True for errors that may pass by themselves: lost connections, time-outs, servers that are too busy.

    Every client library has its own classes for these, so the permanent errors are listed instead.
    """
    return (
        isinstance(error, Exception)
        and not isinstance(error, _PERMANENT)
        and type(error).__name__ not in _PERMANENT_NAMES
    )


def is_refusal(error: BaseException) -> bool:
    """True where a store does not let this user in, or knows no credentials."""
    return isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS


def is_outage(error: BaseException) -> bool:
    """True for what an administrator can put right: no room, no permission, a lost mount, a failing disk."""
    return isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno in _OUTAGES)


def remedy(error: BaseException) -> str:
    """The remedy of an outage, for people to read; empty if that is not known."""
    if isinstance(error, OSError) and error.errno in _OUTAGES:
        return _OUTAGES[error.errno]
    return _OUTAGES[errno.EACCES] if isinstance(error, PermissionError) else ""


def retry(
    action: Callable[[], T],
    patience_s: float,
    is_retryable: Callable[[BaseException], bool] = is_transient,
    *,
    longest_wait_s: float = _LONGEST_WAIT_S,
    what: str = "the store to work again",
    on_wait: Callable[[BaseException], None] = lambda error: None,
) -> T:
    """Calls until it succeeds, fails for good, or ``patience_s`` seconds are over; waits longer each time.

    Args:
        action: must be idempotent: a lost response looks like a failure.
        patience_s: no attempt is begun later than this after the first.
        is_retryable: decides which errors are retried.
        longest_wait_s: between two attempts.
        what: completes "waits for", where that takes long.
        on_wait: called with the error before the first wait.

    Returns:
        What the action returned.

    Raises:
        Exception: the action's last error.
    """
    try:
        return action()  # nearly always enough, and the code below costs more than a small write
    except Exception as error:
        if patience_s <= 0 or not is_retryable(error):
            raise
        failures = [error]
        on_wait(error)

    def attempt() -> T:
        if failures:
            raise failures[0]  # the first attempt was made above
        return action()

    def goes_on(error: BaseException) -> bool:
        # Asked once about each error: the answer may depend on what was asked before.
        return bool(failures and error is failures.pop()) or is_retryable(error)

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(goes_on),
        # Random, so that workers whose store comes back do not all call at once.
        wait=tenacity.wait_random_exponential(_FIRST_WAIT_S, longest_wait_s),
        stop=tenacity.stop_after_delay(patience_s),
        reraise=True,
    )
    with waiting(what, patience_s):
        return retrying(attempt)
