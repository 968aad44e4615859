"""What the kernel that tests run on can do."""

from __future__ import annotations

import platform
import sys


def populates_pages() -> bool:
    """Whether it makes pages writable before they are written to: Linux 5.14 or later."""
    return sys.platform == "linux" and tuple(map(int, platform.release().split(".")[:2])) >= (5, 14)
