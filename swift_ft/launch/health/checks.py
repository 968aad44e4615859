"""The health checks that ship. Each says what is wrong; an empty text is good health."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from swift_ft.host.accelerators import accelerators_expected
from swift_ft.launch.health.clocks import contradicting, difference_in_words
from swift_ft.launch.health.facts import HealthCheck, HealthFacts
from swift_ft.network.addresses import split_endpoint

_MIB = 1 << 20
_PATTERN_BYTES = 64 * _MIB
_DISK_BYTES = 4 * _MIB
_DISK_FAILS_S = 10.0
"""An error of the system's that is over by then may have come of what else goes on there."""
_DISK_PAUSE_S = 0.5
_SIDE = 512
_ODD = 0x9E3779B97F
"""Its multiples have ones and zeros in all places."""
_CONNECT_S = 5.0
_MOST_ASKED = 64
"""Of a large job a machine asks some, from its first to its last address."""
_RATE_S = 1.0
_MOST_UNLIKE_S = 0.05
"""Within that time. NTP changes the rate of both clocks alike; one that it sets just then is read twice."""
_READINGS = 10
_EDAC = Path("/sys/devices/system/edac/mc")


def memory(_: HealthFacts) -> str:
    """The kernel has counted no error that memory could not correct, and memory keeps a pattern."""
    for counter in sorted(_EDAC.glob("mc*/ue_count")):
        if count := int(counter.read_text()):
            return f"the kernel has counted {count} errors of memory that could not be corrected ({counter})"
    return _keeps_pattern(torch.device("cpu"))


def disk(facts: HealthFacts) -> str:
    """A file is what was written, and there is room for it."""
    until = time.monotonic() + _DISK_FAILS_S
    while True:
        try:
            same = _keeps_file(facts.folder)
        except OSError as error:
            if time.monotonic() < until:
                time.sleep(_DISK_PAUSE_S)
                continue
            return f"{facts.folder} cannot be written: {error.strerror}"
        return "" if same else f"a file in {facts.folder} is not what was written"


def product(_: HealthFacts) -> str:
    """A product of matrices is what arithmetic says, on the processor and on each accelerator."""
    return next((wrong for device in _devices() if (wrong := _product_on(device))), "")


def devices(facts: HealthFacts) -> str:
    """Each worker has an accelerator, if workers use any, and the memory of each keeps a pattern."""
    if missing := _missing(facts.workers):
        return missing
    return next((wrong for device in _devices()[1:] if (wrong := _keeps_pattern(device))), "")


def links(facts: HealthFacts) -> str:
    """Most other machines can be reached. One of them may have been lost, and nobody knows it yet."""
    asked = facts.others[:: -(-len(facts.others) // _MOST_ASKED) or 1]
    with ThreadPoolExecutor(_MOST_ASKED) as at_once:  # one that is gone answers only after its time
        answers = at_once.map(_answers, asked)
        failed = [address for address, answer in zip(asked, answers, strict=True) if not answer]
    if len(failed) < 2 or 2 * len(failed) <= len(asked):
        return ""
    return f"{len(failed)} of {len(asked)} other machines cannot be reached, such as {failed[0]}"


def clock(facts: HealthFacts) -> str:
    """The wall clock runs, and is not contradicted by most others, if two or more of them answer."""
    runs_wrong = _runs_wrong(time.time, time.monotonic, time.sleep)
    if runs_wrong and (runs_wrong := _runs_wrong(time.time, time.monotonic, time.sleep)):
        return runs_wrong
    wrong = contradicting(facts.clocks)
    return "" if wrong is None else difference_in_words(wrong)


SHIPPED: dict[str, HealthCheck] = {
    "memory": memory,
    "disk": disk,
    "product": product,
    "devices": devices,
    "links": links,
    "clock": clock,
}
"""By the name in ``--health-checks``."""


def _runs_wrong(
    wall: Callable[[], float], monotonic: Callable[[], float], sleep: Callable[[float], None]
) -> str:
    """The difference in how the wall clock and the monotonic one run, in words. Empty if it is small."""
    begun_at, begun = _both(wall, monotonic)
    sleep(_RATE_S)
    ended_at, ended = _both(wall, monotonic)
    ran_s, passed_s = ended_at - begun_at, ended - begun
    if abs(ran_s - passed_s) <= _MOST_UNLIKE_S * max(1.0, passed_s / _RATE_S):
        return ""
    ran = f"ran {ran_s:.3f} s" if ran_s else "stood still"
    return (
        f"this machine's wall clock {ran} while its monotonic clock ran {passed_s:.3f} s: look at what "
        "sets it (the host of a virtual machine, NTP)"
    )


def _both(wall: Callable[[], float], monotonic: Callable[[], float]) -> tuple[float, float]:
    """Both clocks at one time: the reading in which the process was held up least."""
    readings = []
    for _ in range(_READINGS):
        before, at, after = monotonic(), wall(), monotonic()
        readings.append((after - before, at, (before + after) / 2))
    _, at, middle = min(readings)
    return at, middle


def _devices() -> list[torch.device]:
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if kind is not None else 0
    return [torch.device("cpu"), *(torch.device(str(kind), index) for index in range(count))]


def _missing(workers: int) -> str:
    """Fewer accelerators than workers, where the driver or a device is gone. Empty on a host without any."""
    kind = torch.accelerator.current_accelerator()
    count = len(_devices()) - 1
    if kind is None or count >= workers or not (count or accelerators_expected()):
        return ""
    return (
        f"torch sees {count} of {workers} accelerators ({kind.type}), one for each worker: look at "
        "its driver's log; if workers share one, or use none, leave this check out"
    )


def _product_on(device: torch.device) -> str:
    """The product of two matrices of small integers, which is exact in any order of the sums.

    Row *i* of the first holds ``i % 7``, column *j* of the second ``j % 5``, so that each element of the
    product is ``side * (i % 7) * (j % 5)``: far below 2^24, up to which float32 has all integers.
    """
    rows, columns = torch.arange(_SIDE) % 7, torch.arange(_SIDE) % 5
    first = rows.to(device, torch.float32)[:, None].expand(_SIDE, _SIDE).contiguous()
    second = columns.to(device, torch.float32)[None, :].expand(_SIDE, _SIDE).contiguous()
    found = (first @ second).to("cpu", torch.int64)
    expected = _SIDE * rows[:, None] * columns[None, :]
    wrong = int((found != expected).sum())
    return f"{wrong} of {_SIDE**2} elements of a product of matrices are wrong on {device}" if wrong else ""


def _keeps_pattern(device: torch.device) -> str:
    """Memory of a device holds what was written: a pattern, and the opposite of each of its bits."""
    try:
        pattern = torch.arange(_PATTERN_BYTES // 16, device=device) * _ODD
        opposite = pattern.bitwise_not()
        wrong = int(((pattern ^ opposite) != -1).sum())
        wrong += int((pattern != torch.arange(_PATTERN_BYTES // 16, device=device) * _ODD).sum())
    except (RuntimeError, MemoryError) as error:
        return f"{device} does not give {_PATTERN_BYTES // _MIB} MiB of memory: {str(error).splitlines()[0]}"
    return f"{wrong} words of memory of {device} are not what was written" if wrong else ""


def _keeps_file(folder: str) -> bool:
    """Whether a file in a folder is what was written."""
    written = os.urandom(_DISK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
        # Else the page cache would answer, and not the disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        return file.read() == written


def _answers(address: str) -> bool:
    try:
        with socket.create_connection(split_endpoint(address), timeout=_CONNECT_S):
            return True
    except OSError:
        return False
