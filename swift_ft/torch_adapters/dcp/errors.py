"""DCP's exceptions, and its warnings that do not apply here.

Its errors wrap the cause in an exception that is no ``Exception``.
"""

from __future__ import annotations

import warnings

from torch.distributed.checkpoint.api import CheckpointException

# DCP warns in threads, which no context manager reaches. Here it works without a group on purpose, and the
# next attempt overwrites what a failed one left.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
warnings.filterwarnings("ignore", message="Detected an existing checkpoint in")


def cause_of(error: CheckpointException) -> BaseException:
    """The error that DCP caught, on the only rank there is."""
    cause, _ = next(iter(error.failures.values()))
    return cause
