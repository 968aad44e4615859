"""Health checks: each finds what it is for, and whatever one does, the launcher gets an answer."""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from benchmarks.lib.ports import free_port
from swift_ft.cli import run
from swift_ft.config import exit_codes
from swift_ft.config.exit_codes import EXIT_KEPT_OUT
from swift_ft.config.run_config import RunConfig
from swift_ft.errors import UsageError
from swift_ft.launch.agent import agent
from swift_ft.launch.agent.agent import MachineAgent
from swift_ft.launch.health import checks, clocks, gate
from swift_ft.launch.health.clocks import CLOCK, read_clocks, tell_time
from swift_ft.launch.health.facts import ClockReading, HealthFacts
from swift_ft.launch.health.gate import UnhealthyMachineError, check_names, pass_gate, run_checks
from swift_ft.network import JobSecret, Port
from swift_ft.recovery.job_state import State

ALL = ",".join(checks.SHIPPED)


def facts(folder: Path, *others: str) -> HealthFacts:
    return HealthFacts("m-1.0", after_loss=True, folder=str(folder), others=others)


def crashes(_: HealthFacts) -> str:
    os.abort()


def exits(_: HealthFacts) -> str:
    sys.exit(3)


def ends(_: HealthFacts) -> str:
    os._exit(0)


def hangs(_: HealthFacts) -> str:
    time.sleep(600)
    return ""


def talks(_: HealthFacts) -> str:
    """It writes lines that are no result, some of them after the result."""
    atexit.register(print, "at the end", flush=True)
    print("before the ", end="")
    ctypes.CDLL(None).puts(b"of C")
    return ""


def raises(_: HealthFacts) -> str:
    raise OSError("no such device")


def finds(facts: HealthFacts) -> str:
    return f"fan 2 stands still on {facts.machine}"


def counts(facts: HealthFacts) -> str:
    return f"{facts.workers} workers"


def test_a_healthy_machine_passes_all(tmp_path: Path) -> None:
    assert [*checks.SHIPPED] == [*gate._SHIPPED]
    pass_gate(ALL, facts(tmp_path))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("finds", "finds: fan 2 stands still on m-1.0. Repair it"),
        ("raises", "raises: OSError: no such device"),
        ("crashes", "ended with code -6"),
        ("exits", "exits: SystemExit: 3"),
        ("ends", "ended without a result"),
        ("hangs", "did not end within 20 s"),
    ],
)
def test_a_check_of_ones_own_keeps_a_machine_out(tmp_path: Path, name: str, words: str) -> None:
    # The others end by themselves, on a host that is busy after a while only.
    limit_s = 20.0 if name == "hangs" else 300.0
    with pytest.raises(UnhealthyMachineError) as stays_out:
        pass_gate(f"disk, {__name__}:{name}", facts(tmp_path), limit_s=limit_s)
    assert str(stays_out.value).startswith("machine m-1.0 stays out, after its loss: ")
    assert words in str(stays_out.value)


def test_a_machine_that_is_kept_out_has_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others go on, so a scheduler must not take it for a mistake that ends the run."""
    monkeypatch.setattr(run, "_run", lambda _: pass_gate(f"{__name__}:finds", facts(tmp_path)))
    assert run.main(["--standalone", __file__]) == EXIT_KEPT_OUT
    assert "fan 2 stands still" in capsys.readouterr().err


def test_no_two_exit_codes_are_the_same() -> None:
    codes = [code for name, code in vars(exit_codes).items() if name.startswith("EXIT_")]
    assert len({*codes}) == len(codes) > 4


def test_what_a_check_prints_is_no_result(tmp_path: Path) -> None:
    pass_gate(f"{__name__}:talks,disk", facts(tmp_path))
    with pytest.raises(UnhealthyMachineError, match="finds: fan 2 stands still"):
        pass_gate(f"{__name__}:talks,{__name__}:finds", facts(tmp_path))


@pytest.mark.parametrize("result", [b"", b"{", b"[1]", b"\xff"])
def test_a_result_that_cannot_be_read_is_none(result: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, result)
    assert gate._failed_of(reader) is None
    os.close(reader)
    os.close(writer)


class Stuck:
    """A process that the kernel does not let go: no signal ends it."""

    def __init__(self) -> None:
        self.killed = 0
        self.limits: list[float] = []

    def communicate(self, _: str = "", *, timeout: float) -> NoReturn:
        self.limits.append(timeout)
        raise subprocess.TimeoutExpired("checks", timeout)

    def kill(self) -> None:
        self.killed += 1


def test_a_process_that_no_signal_ends_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: stuck)
    with pytest.raises(UnhealthyMachineError, match="did not end within 7 s"):
        pass_gate("disk", facts(tmp_path), limit_s=7.0)
    assert (stuck.killed, stuck.limits) == (1, [7.0, gate._KILLED_S])


def test_a_check_that_is_not_there_fails(tmp_path: Path) -> None:
    failed = run_checks(["disk", "no.such.module:check"], facts(tmp_path))
    assert [*failed] == ["no.such.module:check"]
    assert "ModuleNotFoundError" in failed["no.such.module:check"]


def test_an_unknown_name_is_refused_before_anything_begins() -> None:
    check_names("disk, memory,mine.own:check")
    with pytest.raises(UsageError, match="there is no check 'disc': write memory, disk"):
        check_names("disk,disc")


def test_a_wrong_product_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__

    def off_by_one_bit(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        found = right(first, second)
        found.view(torch.int32)[17, 3] ^= 1 << 12
        return found

    assert checks.product(facts(tmp_path)) == ""
    monkeypatch.setattr(torch.Tensor, "__matmul__", off_by_one_bit)
    assert checks.product(facts(tmp_path)) == "1 of 262144 elements of a product of matrices are wrong on cpu"


def test_memory_that_the_kernel_has_found_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mc0").mkdir()
    (tmp_path / "mc0" / "ue_count").write_text("0\n")
    monkeypatch.setattr(checks, "_EDAC", tmp_path)
    assert checks.memory(facts(tmp_path)) == ""
    (tmp_path / "mc0" / "ue_count").write_text("2\n")
    assert "2 errors of memory" in checks.memory(facts(tmp_path))


def test_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_DISK_FAILS_S", 0.0)
    assert "cannot be written" in checks.disk(facts(tmp_path / "gone"))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_of_a_disk_that_passes(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, tried = os.fsync, []

    def fails_once(file: int) -> None:
        tried.append(file)
        if len(tried) == 1:
            raise OSError(number, os.strerror(number))
        sync(file)

    monkeypatch.setattr(checks, "_DISK_PAUSE_S", 0.0)
    monkeypatch.setattr(os, "fsync", fails_once)
    assert checks.disk(facts(tmp_path)) == ""
    assert len(tried) == 2


@pytest.mark.parametrize("in_opposite", [True, False])
def test_memory_that_does_not_keep_a_pattern(
    in_opposite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of one word flips: in the pattern, or in the opposite of its bits."""
    owner, name = (torch.Tensor, "bitwise_not") if in_opposite else (torch, "arange")
    write, flips = getattr(owner, name), [1 << 7]

    def written(*args: Any, **options: Any) -> torch.Tensor:
        words: torch.Tensor = write(*args, **options)
        words[1000] ^= flips.pop() if flips else 0
        return words

    monkeypatch.setattr(owner, name, written)
    assert checks.memory(facts(tmp_path)) == "1 words of memory of cpu are not what was written"
    assert not flips
    assert checks.memory(facts(tmp_path)) == ""


def test_a_disk_that_keeps_something_else_is_not_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That was no error of the system's, which another attempt could excuse."""
    written = iter([b"written", b"read"])
    monkeypatch.setattr(os, "urandom", lambda _: next(written))
    monkeypatch.setattr(os, "fsync", lambda file: os.pwrite(file, b"changed", 0))
    assert checks.disk(facts(tmp_path)) == f"a file in {tmp_path} is not what was written"


def test_the_disk_that_is_checked_is_not_the_one_of_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All machines of a cluster share that, and would be kept out together."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert gate.facts_of("m-1.0", [], 8, after_loss=False).folder == str(tmp_path)
    monkeypatch.delenv("TMPDIR")
    assert gate.facts_of("m-1.0", [], 8, after_loss=False).folder == "/tmp"


def test_no_other_folder_is_checked_for_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own choice would be one that can, or else an error of the launcher."""
    broken = tmp_path / "broken"
    monkeypatch.setenv("TMPDIR", str(broken))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(checks, "_DISK_FAILS_S", 0.0)
    told = gate.facts_of("m-1.0", [], 8, after_loss=False)
    assert checks.disk(told) == f"{broken} cannot be written: No such file or directory"


@pytest.mark.parametrize(("asked_for", "host"), [("", ""), ("disk", "A")])
def test_a_machine_that_is_not_checked_needs_no_facts(
    asked_for: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may cost it something: a pod with a read-only root has no folder for temporary files."""
    checked: list[str] = []
    monkeypatch.setattr(agent, "facts_of", lambda machine, *_, **__: checked.append(machine))
    monkeypatch.setattr(agent, "pass_gate", lambda *_: None)
    machine: Any = MachineAgent.__new__(MachineAgent)
    machine._membership = SimpleNamespace(machine="m-1.0", host=host, follower=SimpleNamespace(state=State()))
    secret = JobSecret.generated()
    machine._settings = SimpleNamespace(config=RunConfig(health_checks=asked_for), secret=secret)
    machine._show_health(after_loss=False)
    assert checked == []
    machine._membership.host, machine._settings.config = "", RunConfig(health_checks="disk")
    machine._show_health(after_loss=False)
    assert checked == ["m-1.0"]


def test_links_fail_where_most_do_not_answer(tmp_path: Path) -> None:
    gone = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    assert checks.links(facts(tmp_path, gone[0])) == ""  # it may be the lost one
    assert checks.links(facts(tmp_path, *gone)).startswith("3 of 3 other machines cannot be reached")


def test_links_are_asked_at_once_and_of_a_large_job_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, machines that are gone would take longer than all checks may."""
    asked: list[str] = []
    together = threading.Barrier(24)

    def is_gone(address: str) -> bool:
        asked.append(address)
        together.wait(60)
        return False

    monkeypatch.setattr(checks, "_answers", is_gone)
    found = checks.links(facts(tmp_path, *(f"10.0.0.1:{port}" for port in range(24))))
    assert found.startswith("24 of 24 other machines cannot be reached")

    asked.clear()

    def answers(address: str) -> bool:
        asked.append(address)
        return True

    monkeypatch.setattr(checks, "_answers", answers)
    many = [f"10.0.0.1:{port}" for port in range(4096)]
    assert checks.links(facts(tmp_path, *many)) == ""
    assert (len(asked), min(map(many.index, asked)), max(map(many.index, asked))) == (64, 0, 4032)


@pytest.mark.parametrize(
    ("visible", "expected", "words"),
    [
        (0, True, "torch sees 0 of 2 accelerators"),  # the driver is gone
        (1, True, "torch sees 1 of 2 accelerators"),
        (1, False, "torch sees 1 of 2 accelerators"),
        (2, True, ""),
        (0, False, ""),  # a job of the processor alone, with a torch that could do more
    ],
)
def test_accelerators_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: int, expected: bool, words: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    monkeypatch.setattr(checks, "accelerators_expected", lambda: expected)
    monkeypatch.setattr(checks, "_keeps_pattern", lambda _: "")
    assert checks.devices(replace(facts(tmp_path), workers=2)).startswith(words)
    assert bool(checks.devices(replace(facts(tmp_path), workers=2))) == bool(words)
    assert checks.devices(facts(tmp_path)) == ""  # it is not known how many there should be


def test_a_torch_for_the_processor_expects_no_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(checks, "accelerators_expected", lambda: True)
    assert checks.devices(replace(facts(tmp_path), workers=2)) == ""


def test_a_check_is_told_how_many_workers_there_are() -> None:
    told = gate.facts_of("m-1.0", ["h:1"], 8, after_loss=False)
    assert told == HealthFacts("m-1.0", after_loss=False, folder=told.folder, others=("h:1",), workers=8)
    with pytest.raises(UnhealthyMachineError, match="8 workers"):
        pass_gate(f"{__name__}:counts", told)


class Clocks:
    """A machine's wall clock and its monotonic one, which nobody waits for."""

    def __init__(self, rate: float = 1.0, jump_s: float = 0.0) -> None:
        self.rate = rate
        self.jump_s = jump_s
        self.passed_s = 0.0
        self.jumped_s = 0.0

    def time(self) -> float:
        return 1.8e9 + self.rate * self.passed_s + self.jumped_s

    def monotonic(self) -> float:
        self.passed_s += 1e-6
        return 50.0 + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds
        self.jumped_s, self.jump_s = self.jumped_s + self.jump_s, 0.0


def at(*ahead_s: float, error_s: float = 0.001) -> tuple[ClockReading, ...]:
    """As other machines have it."""
    return tuple(ClockReading(f"10.0.0.{n}:1", one, error_s) for n, one in enumerate(ahead_s, 1))


@pytest.mark.parametrize(
    ("ahead_s", "words"),
    [
        ((), ""),  # nobody is there to be asked
        ((0.1,), ""),
        ((119.0, -119.0), ""),
        ((900.0,), ""),  # one of the two is wrong, and nobody knows which
        ((121.0, 122.0), "this machine's clock is 2 min 1 s behind that of 10.0.0.1:1 (known to 0.001 s)"),
        ((-86400.0, -86401.0), "this machine's clock is 24 h ahead of that of 10.0.0.1:1 (known to 0.001 s)"),
        ((900.0, 0.0), ""),
        ((900.0, -900.0), ""),  # they contradict each other, too
        ((900.0, 1100.0), ""),
        ((900.0, 0.0, 0.0), ""),
        ((900.0, -900.0, 1800.0), ""),
        ((900.0, 901.0, 0.0), "this machine's clock is 15 min 0 s behind that of 10.0.0.1:1"),
        ((-900.0, 900.0, 901.0), "this machine's clock is 15 min 0 s behind that of 10.0.0.2:1"),
    ],
)
def test_a_clock_that_most_others_contradict(
    ahead_s: tuple[float, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of two or more, who agree: else the first machine of a run would keep all others out."""
    monkeypatch.setattr(checks, "time", Clocks())
    found = checks.clock(replace(facts(tmp_path), clocks=at(*ahead_s)))
    assert found.startswith(words)
    assert bool(found) == bool(words)
    assert not found or "chronyc tracking" in found


@pytest.mark.parametrize(
    ("names", "ahead_s", "warned"),
    [
        ("clock", (900.0,), True),
        ("clock", (900.0, 0.0), True),
        ("clock", (900.0, -900.0), True),
        ("clock", (), False),
        ("clock", (0.0,), False),
        ("clock", (900.0, 0.0, 0.0), False),
        ("disk", (900.0,), False),
    ],
)
def test_a_machine_is_warned_of_clocks_of_which_nobody_knows_the_wrong_one(
    names: str,
    ahead_s: tuple[float, ...],
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(gate, "_run_apart", lambda *_: (0, [], {}))
    with caplog.at_level("WARNING"):
        pass_gate(names, replace(facts(tmp_path), clocks=at(*ahead_s)))
    said = [record.getMessage() for record in caplog.records]
    assert [one.startswith("machine m-1.0 takes part, but this machine's clock is") for one in said] == (
        [True] if warned else []
    )


def test_a_slow_answer_proves_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "time", Clocks())
    assert checks.clock(replace(facts(tmp_path), clocks=at(124.0, 124.0, error_s=5.0))) == ""
    assert checks.clock(replace(facts(tmp_path), clocks=at(126.0, 126.0, error_s=5.0)))


@pytest.mark.parametrize(
    ("clocks", "words"),
    [
        (Clocks(), ""),
        (Clocks(rate=1.01), ""),
        (Clocks(rate=0.0), "this machine's wall clock stood still while its monotonic clock ran 1.000 s"),
        (Clocks(rate=2.0), "this machine's wall clock ran 2.000 s while its monotonic clock ran 1.000 s"),
        (Clocks(rate=-1.0), "this machine's wall clock ran -1.000 s while its monotonic"),
        (Clocks(jump_s=3600.0), ""),  # NTP has set it
    ],
)
def test_a_clock_that_runs_otherwise(
    clocks: Clocks, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "time", clocks)
    found = checks.clock(facts(tmp_path))
    assert found.startswith(words)
    assert bool(found) == bool(words)


def test_machines_tell_each_other_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = JobSecret.generated()
    port, stranger = (Port("127.0.0.1", of, {CLOCK: tell_time}) for of in (secret, JobSecret.generated()))
    monkeypatch.setattr(clocks, "_LIMIT_S", 60.0)  # of a host that is busy
    try:
        gone = f"127.0.0.1:{free_port()}"
        (reading,) = read_clocks([port.address, gone, stranger.address], secret)
        assert reading.address == port.address
        assert abs(reading.ahead_s) <= reading.error_s < clocks._LIMIT_S
        wrong = SimpleNamespace(time=lambda: time.time() - 600, monotonic=time.monotonic)
        told = clocks.tell_time

        def tells(asker: Any) -> None:
            monkeypatch.setattr(clocks, "time", time)
            told(asker)

        port.serve(CLOCK, tells)
        monkeypatch.setattr(clocks, "time", wrong)
        (reading,) = read_clocks([port.address], secret)
        assert abs(reading.ahead_s - 600) <= reading.error_s + 0.01
        assert read_clocks([], secret) == ()
    finally:
        port.close()
        stranger.close()


def test_of_a_large_job_a_few_clocks_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(clocks, "_read_clock", lambda address, secret: asked.append(address))
    assert read_clocks([f"10.0.0.1:{port}" for port in range(1000)], JobSecret.generated()) == ()
    assert len(asked) == clocks._MOST_ASKED


@pytest.mark.parametrize("fails", [OSError("unreachable"), UnicodeError("label too long")])
def test_who_does_not_answer_holds_nobody_up(fails: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up of a name has no limit of its own, and a machine that is gone never answers."""
    over = threading.Event()

    def look_up(host: str, *_: object, **__: object) -> NoReturn:
        if host == "named":
            over.wait(60)
        raise fails

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(clocks, "_LIMIT_S", 0.5)
    began = time.monotonic()
    assert read_clocks(["named:1", "other:1", "named:2"], JobSecret.generated()) == ()
    assert 0.5 <= time.monotonic() - began < 30
    over.set()
    began = time.monotonic()
    monkeypatch.setattr(clocks, "_LIMIT_S", 50.0)
    assert read_clocks(["other:1", "other:2"], JobSecret.generated()) == ()
    assert time.monotonic() - began < 40, "all have failed: nothing is waited for"


@pytest.mark.parametrize(
    ("asked_for", "read"),
    [("memory,disk,links", False), ("disk, clock", True), ("disk,mine.own:check", True)],
)
def test_clocks_are_read_for_checks_that_use_them(
    asked_for: str, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above all on the way back after a loss, when a machine that is gone costs all of the time for it."""
    asked: list[object] = []

    def reads(*of: object) -> tuple[ClockReading, ...]:
        asked.append(of)
        return at(0.5)

    told: list[HealthFacts] = []
    monkeypatch.setattr(agent, "read_clocks", reads)
    monkeypatch.setattr(agent, "pass_gate", lambda _, facts: told.append(facts))
    machine: Any = MachineAgent.__new__(MachineAgent)
    machine._membership = SimpleNamespace(machine="m-1.0", host="", follower=SimpleNamespace(state=State()))
    secret = JobSecret.generated()
    machine._settings = SimpleNamespace(config=RunConfig(health_checks=asked_for), secret=secret)
    machine._show_health(after_loss=True)
    assert (bool(asked), [one.clocks for one in told]) == (read, [at(0.5) if read else ()])


def test_a_clock_that_is_wrong_keeps_a_machine_out(tmp_path: Path) -> None:
    """What was read of others reaches the process of the checks."""
    with pytest.raises(UnhealthyMachineError, match="clock: this machine's clock is 15 min 0 s behind"):
        pass_gate("clock", replace(facts(tmp_path), clocks=at(900.0, 900.0)))
