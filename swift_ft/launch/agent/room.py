"""Room on this machine for as many workers again as it has: those of a guest, or of the next world."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pynvml

from swift_ft.errors import first_line
from swift_ft.host.memory import available_bytes
from swift_ft.units import format_bytes

_ROOM = 1.2
"""Memory that must be left, by byte that this machine's workers take. A replay takes more than training."""


def why_no_room(workers: Iterable[int], needs: str) -> str:
    """Why as many workers again do not fit here; empty if they do.

    Args:
        workers: pids of this machine's workers.
        needs: who would need it, in words: ``a guest needs``.
    """
    needed, left = int(_ROOM * resident_bytes(workers)), available_bytes()
    if left is not None and needed > left:
        return f"{format_bytes(left)} of memory are left, and {needs} {format_bytes(needed)}"
    return why_not_on_devices(needs)


def why_not_on_devices(needs: str, devices: Path = Path("/dev")) -> str:
    """Why the memory of a GPU is too small for as many workers again as this machine has."""
    if not (devices / "nvidiactl").exists():
        return ""
    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"the driver does not say how much memory its GPUs have left ({first_line(error)})"
    for index, device in enumerate(memory):
        if (needed := int(device.used * _ROOM)) > device.free:
            sizes = format_bytes(device.free), format_bytes(needed)
            return f"{sizes[0]} of the memory of GPU {index} are left, and {needs} {sizes[1]}"
    return ""


def resident_bytes(pids: Iterable[int], proc: Path = Path("/proc")) -> int:
    """Bytes of memory that processes have for themselves. Those that have ended have none."""
    total = 0
    for pid in pids:
        try:
            lines = (proc / str(pid) / "status").read_text().splitlines()
        except OSError:
            continue
        own = (line for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
        total += sum(int(line.split()[1]) * 1024 for line in own)
    return total
