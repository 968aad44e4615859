"""The kernel's messages that explain why a worker is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft.config import detection_timings as timings
from swift_ft.launch.detection import kernel_log
from swift_ft.launch.detection.kernel_log import KernelLog
from swift_ft.recovery.causes import Cause
from tests.support.kernel_messages import DISK, LINK, MEMORY, OOM, SEGFAULT, XID, Kernel, said
from tests.support.missing import skip_for_missing
from tests.support.waiting import wait_until

ORDINARY = "usb 1-1: new high-speed USB device number 2"


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path / "kmsg")
    yield made
    made.log.close()


@pytest.mark.parametrize(
    ("text", "native", "by_signal"),
    [
        (XID, Cause.DEVICE, Cause.DEVICE),
        (MEMORY, Cause.MACHINE, Cause.MACHINE),
        (LINK, Cause.NATIVE, Cause.SIGNAL),
        ("NVRM: Xid (PCI:0000:19:00): 63, pid='<unknown>', Row remapping", Cause.DEVICE, Cause.SIGNAL),
        *((f"NVRM: Xid (PCI:0000:19:00): {n}, pid=4711", Cause.NATIVE, Cause.SIGNAL) for n in (13, 31, 45)),
        ("mce: [Hardware Error]: CPU 1: Machine Check Exception: 5 Bank 4", Cause.MACHINE, Cause.SIGNAL),
        ("{1}[Hardware Error]: section_type: memory error", Cause.NATIVE, Cause.SIGNAL),
    ],
)
def test_errors_of_hardware_are_evidence_and_some_a_cause(
    text: str, native: Cause, by_signal: Cause, kernel: Kernel
) -> None:
    kernel.say(ORDINARY, text, ORDINARY)
    assert kernel.log.evidence(4711) == said(text)
    assert kernel.log.hardware(4711, Cause.NATIVE) == native
    assert kernel.log.hardware(4711, Cause.SIGNAL) == by_signal
    assert kernel.log.hardware(4711, Cause.INJECTED) == Cause.INJECTED


@pytest.mark.parametrize(
    "text",
    [
        "mce: [Hardware Error]: Machine check events logged",
        "[Hardware Error]: Corrected error, no action required.",
        "{1}[Hardware Error]: event severity: corrected",
    ],
)
def test_a_corrected_error_explains_nothing(text: str, kernel: Kernel) -> None:
    kernel.say(text)
    assert kernel.log.evidence() == ()
    assert kernel.log.hardware(0, Cause.NATIVE) == Cause.NATIVE


@pytest.mark.parametrize("text", [XID, MEMORY])
def test_hardware_that_another_process_has_met_is_no_cause(text: str, kernel: Kernel) -> None:
    kernel.say(text)
    assert kernel.log.evidence(471) == said(text)
    assert kernel.log.hardware(471, Cause.NATIVE) == Cause.NATIVE
    assert kernel.log.hardware(0, Cause.NATIVE) != Cause.NATIVE  # not known which one has ended


@pytest.mark.parametrize(("texts", "left"), [((XID,), ()), ((MEMORY, LINK), (LINK,)), ((LINK,), (LINK,))])
def test_what_has_explained_a_failure_explains_no_later_one(
    texts: tuple[str, ...], left: tuple[str, ...], kernel: Kernel
) -> None:
    """A link is between many machines."""
    kernel.say(*texts)
    kernel.log.forget()
    assert kernel.log.evidence() == said(*left)
    assert kernel.log.hardware(0, Cause.NATIVE) == Cause.NATIVE


def test_the_newest_three(kernel: Kernel) -> None:
    kernel.say(DISK, LINK, XID, f"{LINK} {'x' * 500}")
    assert kernel.log.evidence() == said(LINK, XID, f"{LINK} {'x' * (199 - len(LINK))}")


def test_only_of_some_causes(kernel: Kernel) -> None:
    kernel.say(XID, LINK, DISK)
    assert kernel.log.evidence(causes=[Cause.NETWORK]) == said(LINK)
    assert kernel.log.evidence(causes=[]) == ()


@pytest.mark.parametrize("text", [SEGFAULT, OOM, "NVRM: Xid (PCI:0000:19:00): 45, pid=4711, name=python3"])
def test_what_names_another_process_explains_nothing(text: str, kernel: Kernel) -> None:
    kernel.say(text)
    assert kernel.log.evidence(pid=471) == ()
    assert kernel.log.evidence(pid=4711) == said(text)


OLD_OOM = OOM.replace("Killed", "Kill")
OWN_OOM = OOM.replace("ut of memory:", "ut of memory (oom_kill_allocating_task):")


@pytest.mark.parametrize("text", [OOM, OLD_OOM, OWN_OOM])
def test_whom_the_kernel_has_killed(text: str, kernel: Kernel) -> None:
    assert not kernel.log.may_have_killed(4711)
    kernel.say(text)
    assert kernel.log.may_have_killed(4711)
    assert not kernel.log.may_have_killed(471)
    assert kernel.log.may_have_killed(0), "not known which one has ended"


def test_nobody_knows_whom_it_has_killed_elsewhere(container: Kernel) -> None:
    """Its own numbers tell a container nothing, and many may not read the log at all."""
    assert container.log.may_have_killed(17)
    assert KernelLog(Path("/none")).may_have_killed(17)


OF_A_DEVICE = "NVRM: Xid (PCI:0000:19:00): 119, pid=4711, name=python3, Timeout after 6s of waiting for RPC"


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Kernel]:
    """Its processes have two numbers each, and know one. It sees two of the host's devices."""
    made = Kernel(tmp_path / "of-a-container", same_numbers=False, devices=["0000:19:00.0", "0000:3b:00.0"])
    yield made
    made.log.close()


@pytest.mark.parametrize(
    "text",
    [
        OF_A_DEVICE,
        XID,
        OF_A_DEVICE.replace("pid=4711", "pid='<unknown>'"),
        "NVRM: GPU at PCI:0000:3B:00.0 has fallen off the bus.",
    ],
)
def test_in_a_container_an_error_of_a_device_that_it_sees_counts(text: str, container: Kernel) -> None:
    """Whatever process the message names: that may be one of its own, under another number."""
    container.say(text, SEGFAULT)
    assert container.log.evidence(17) == said(text)
    assert container.log.hardware(17, Cause.NATIVE) == Cause.DEVICE
    assert container.log.hardware(17, Cause.SIGNAL) == Cause.DEVICE


@pytest.mark.parametrize(
    "text",
    [
        *(SEGFAULT, OOM, MEMORY),
        *(one.replace("0000:19:00", "0000:1a:00") for one in (OF_A_DEVICE, XID)),
        "NVRM: GPU at PCI:0000:1a:00 has fallen off the bus.",
        "amdgpu 0000:1a:00.0: amdgpu: GPU reset begin!",
        "[drm] amdgpu ring gfx_0 timeout, process python3 pid=4711",
        "NVRM: Xid (PCI:0000:19:00): 45, pid='<unknown>', Preemptive Removal",
    ],
)
def test_in_a_container_what_may_be_of_another_one_explains_nothing(text: str, container: Kernel) -> None:
    container.say(text)
    assert container.log.evidence(17) == container.log.evidence() == ()
    for pid in (17, 4711, 0):
        assert container.log.hardware(pid, Cause.NATIVE) == Cause.NATIVE
        assert container.log.hardware(pid, Cause.SIGNAL) == Cause.SIGNAL


@pytest.mark.parametrize(
    "text", [LINK, DISK, "mce: [Hardware Error]: CPU 1: Machine Check Exception: 5 Bank 4"]
)
def test_in_a_container_what_names_no_process_is_of_the_host(text: str, container: Kernel) -> None:
    container.say(text)
    assert container.log.evidence(17) == said(text)


def test_the_threads_of_processes_are_listed_now_and_then(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each heartbeat; at once for a new process; never under a number that may be another one's."""
    listed: list[int] = []

    def threads_of(pid: int) -> frozenset[int]:
        listed.append(pid)
        return frozenset({pid, 10 * pid + len(listed)})

    monkeypatch.setattr(kernel_log, "_threads_of", threads_of)
    monkeypatch.setattr(timings, "THREADS_S", 3600.0)
    for _ in range(3):
        kernel.log.look([100])
    assert listed == [100]
    kernel.log.look([100, 200])
    assert listed == [100, 100, 200]
    monkeypatch.setattr(timings, "THREADS_S", 0.0)
    kernel.log.look([100])  # the set has changed, and from now on each look is due
    kernel.log.look([100], ended=[100])
    assert listed == [100, 100, 200, 100]
    crash = SEGFAULT.replace("4711", "1004")
    kernel.say(crash)
    assert kernel.log.evidence(100) == said(crash), "what it had when it ran last"


def test_a_thread_s_number_is_its_process_s(kernel: Kernel) -> None:
    """The kernel names a thread that crashes. By then its process is gone."""
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        ended.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    kernel.log.look([os.getpid(), 4711])
    ended.set()
    thread.join()
    crash = SEGFAULT.replace("4711", str(thread.native_id))
    kernel.say(crash)
    assert kernel.log.evidence(os.getpid()) == said(crash)
    assert kernel.log.evidence(4711) == ()
    kernel.log.look([])
    assert kernel.log.evidence(os.getpid()) == ()


def test_what_is_old_explains_nothing(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.say(XID)
    monkeypatch.setattr(timings, "KERNEL_MESSAGE_S", 0.0)
    assert kernel.log.evidence() == ()
    assert kernel.log.hardware(0, Cause.NATIVE) == Cause.NATIVE


@pytest.mark.parametrize("is_there", [True, False])
def test_a_log_that_cannot_be_read_says_nothing(is_there: bool, tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    if is_there:
        path.mkdir()
    log = KernelLog(path)
    log.look()
    assert (log.evidence(), log.hardware(0, Cause.NATIVE)) == ((), Cause.NATIVE)
    log.close()


def test_the_real_kernel_s_word_on_a_crash() -> None:
    """What it had said before is not read."""
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        skip_for_missing(f"/dev/kmsg that may be read ({error})")
    traced = Path("/proc/sys/debug/exception-trace")
    if not traced.exists() or traced.read_text().strip() == "0":
        skip_for_missing("a kernel that logs segmentation faults (debug.exception-trace)")
    log = KernelLog()
    if not log._same_numbers:
        skip_for_missing("the kernel's own numbers of processes: this is a container")
    crashed = subprocess.Popen([sys.executable, "-c", "import ctypes; ctypes.string_at(0)"])
    assert crashed.wait() < 0
    wait_until(lambda: bool(log.evidence(crashed.pid)), "the kernel's message")
    (text,) = log.evidence(crashed.pid)
    assert "segfault at 0" in text
    assert not log.evidence(crashed.pid + 1)
    log.close()
