"""What becomes of host memory that is freed.

glibc gives the free end of its heap back to the kernel when that is larger than twice the largest block that
the process has freed so far (``M_TRIM_THRESHOLD`` in mallopt(3)). A new process has freed no large one yet.
So each of its iterations gives gradients and activations back, and the kernel maps and clears them again.
"""

from __future__ import annotations

import torch

__all__ = ["keep_freed_memory"]

_BYTES = 32 * 2**20 - 64 * 2**10
"""A little less than the largest block that counts."""


def keep_freed_memory() -> None:
    """Allocate a large block and free it untouched: from then on glibc keeps up to 64 MiB of freed memory.

    It changes nothing with another allocator, or with thresholds that the user has set.
    """
    torch.empty(_BYTES, dtype=torch.uint8)
