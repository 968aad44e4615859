"""A kernel's log that a test writes. The real one is every test's of this host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from swift_ft.launch.detection.kernel_log import KernelLog

XID = "NVRM: Xid (PCI:0000:19:00): 79, pid=4711, GPU has fallen off the bus."
MEMORY = "Memory failure: 0x1a2b3c: Killing python3:4711 due to hardware memory corruption"
LINK = "mlx5_core 0000:3b:00.0 ens1f0: Link down"
DISK = "blk_update_request: I/O error, dev nvme0n1, sector 81920"
SEGFAULT = "python3[4711]: segfault at 0 ip 00007f sp 00007f error 4 in libc.so.6"
OOM = "Memory cgroup out of memory: Killed process 4711 (python3) total-vm:602504kB"


class Kernel:
    """A log that a test writes, one record at a time.

    Args:
        path: where it is made.
        same_numbers: processes here have the numbers that are in its messages.
        devices: PCI addresses of the accelerators here.
    """

    def __init__(self, path: Path, *, same_numbers: bool = True, devices: Sequence[str] = ()) -> None:
        os.mkfifo(path)
        self.log = KernelLog(path, same_numbers, devices)
        self._file = os.open(path, os.O_WRONLY)

    def say(self, *texts: str) -> None:
        """Write a record for each of these texts, and have it read."""
        for number, text in enumerate(texts):
            os.write(self._file, f"3,{number},77512365410,-;{text}\n SUBSYSTEM=pci\n".encode())
            self.log.look()


def said(*texts: str) -> tuple[str, ...]:
    """Such texts as evidence."""
    return tuple(f"the kernel said: {text}" for text in texts)
