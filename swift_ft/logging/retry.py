"""Patience with stores that are down, slow or overloaded for a while."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import tenacity

__all__ = ["is_transient", "lacks_room", "patiently"]

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
# What waiting does not cure: something is absent or in the way, is not allowed, or was asked for wrongly.
_LASTING = (
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
# botocore's, which need not be installed: their base class is that of its passing errors, too.
_LASTING_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError"}

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}

T = TypeVar("T")


def is_transient(error: BaseException) -> bool:
    """True for errors that may pass by themselves: lost connections, time-outs, servers that are too busy.

    Every client library has errors of its own for these, so that it is the lasting ones that are listed.
    """
    return (
        isinstance(error, Exception)
        and not isinstance(error, _LASTING)
        and type(error).__name__ not in _LASTING_NAMES
    )


def lacks_room(error: BaseException) -> bool:
    """True for what an administrator can put right on a local disk: no room, no quota, no permission."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def patiently(
    action: Callable[[], T],
    patience_s: float,
    passes: Callable[[BaseException], bool] = is_transient,
    *,
    longest_wait_s: float = _LONGEST_WAIT_S,
) -> T:
    """Calls until it succeeds, fails for good, or ``patience_s`` seconds are over; waits longer each time.

    Args:
        action: must do no harm if it is done twice, since an answer that got lost looks like a failure.
        patience_s: no attempt is begun later than this after the first.
        passes: tells which errors are waited for.
        longest_wait_s: between two attempts.

    Returns:
        What the action returned.

    Raises:
        Exception: the action's last error.
    """
    try:
        return action()  # as nearly always, and what follows costs more than a small write
    except Exception as error:
        if patience_s <= 0:
            raise
        failures = [error]

    def attempt() -> T:
        if failures:
            raise failures.pop()  # the first attempt was made above
        return action()

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(passes),
        # Random, so that workers whose store comes back do not all call at once.
        wait=tenacity.wait_random_exponential(_FIRST_WAIT_S, longest_wait_s),
        stop=tenacity.stop_after_delay(patience_s),
        reraise=True,
    )
    return retrying(attempt)
