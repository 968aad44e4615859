"""Commands of a user who owns nothing, started by root."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534
"""The user."""

_INTO_VIEW = """
set -e
for folder in "$@"; do [ "$folder" = -- ] && break; shown="$shown $folder"; done
number=0
mount -t tmpfs tmpfs /mnt
for folder in $shown; do number=$((number + 1)); mkdir /mnt/$number; mount --bind "$folder" /mnt/$number; done
[ -n "$hidden" ] && mount -t tmpfs -o mode=755 tmpfs "$hidden"
number=0
for folder in $shown; do number=$((number + 1)); mkdir -p "$folder"; mount --bind /mnt/$number "$folder"; done
while [ "$1" != -- ]; do shift; done
shift
exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
"""


def as_nobody(command: Sequence[str]) -> list[str]:
    """A command line that runs a command as that user, who can read this Python and this checkout.

    Root's home may hold them, and be closed to others: in a mount namespace of the command's own another
    folder lies over it, in which there is only what is needed.
    """
    needed = [Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2]]
    closed = sorted({place for path in needed for place in path.parents if not place.stat().st_mode & 0o001})
    shown = [str(path) for path in dict.fromkeys(needed) if closed and path.is_relative_to(closed[0])]
    hidden = f"hidden={closed[0]}" if closed else "hidden="
    return ["unshare", "--mount", "env", hidden, "sh", "-c", _INTO_VIEW, "sh", *shown, "--", *command]
