"""Whose fault a failure is, by what was seen of it."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from email.message import Message
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.data import TensorDataset

import swift_ft
from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.data.indexed import IndexedBatches
from swift_ft.errors import CheckpointError, GaveUpError, RendezvousLostError
from swift_ft.launch.processes.script_error import whose_fault
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import ADVICE, Cause, cause_of, cause_of_signal
from swift_ft.runtime.fault_injector import InjectedError


class ReadTimeout(OSError):
    """An error of a client of servers."""


def lost(**facts: object) -> ev.MachineLost:
    return ev.MachineLost(machine="m", reason="gone", **facts)  # type: ignore[arg-type]


def late(*machines: str, located: tuple[str, ...]) -> ev.DeadlinePassed:
    return ev.DeadlinePassed(
        generation=1, phase="agreeing", machines=machines, reason="late", located=located
    )


def test_a_person_is_told_what_to_do_for_every_cause() -> None:
    assert {*ADVICE} == {*Cause}


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (lost(), Cause.MACHINE),
        (lost(cause=Cause.MEMORY.value), Cause.MEMORY),
        (lost(stopped_by=15), Cause.SIGNAL),
        (lost(stopped_by=15, cause=Cause.SCHEDULER.value), Cause.SCHEDULER),
        (lost(cause="swift_ft"), Cause.RUNTIME),
        (ev.ScriptFailed(machine="m", started_in=1, reason="no"), Cause.SCRIPT),
        (ev.ScriptFailed(machine="m", started_in=1, reason="no", cause="device"), Cause.DEVICE),
        (ev.CommunicationFailed(rank=0, generation=1, reason="reset"), Cause.NETWORK),
        (ev.CheckpointDamaged(rank=0, generation=1, iteration=4, reason="cut"), Cause.STORE),
        (ev.ReplayFailed(rank=0, generation=1, reason="torn"), Cause.STORE),
        (ev.ReplayFailed(rank=0, generation=1, reason="unlike", diverged=True), Cause.MACHINE),
        (ev.DeadlinePassed(generation=1, phase="agreeing", machines=("m",), reason="late"), Cause.MACHINE),
        (late("m", located=("m",)), Cause.SCRIPT),
        (late("m", "n", located=("n",)), Cause.MACHINE),
        (ev.JobClosed(reason="closed"), Cause.RUNTIME),
    ],
)
def test_events_have_a_cause(event: ev.Event, cause: Cause) -> None:
    assert cause_of(event) == cause


def test_signals_for_errors_of_ones_own_come_from_native_code() -> None:
    assert {cause_of_signal(name) for name in ("SIGSEGV", "SIGBUS", "SIGABRT")} == {Cause.NATIVE}
    assert {cause_of_signal(name) for name in ("SIGKILL", "SIGTERM", "SIGUSR1")} == {Cause.SIGNAL}


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("batch of 3"), Cause.SCRIPT),
        (ValueError("the user says: out of memory"), Cause.SCRIPT),
        (MemoryError(), Cause.MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory"), Cause.MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Cause.MEMORY),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Cause.DEVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), Cause.MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), Cause.DEVICE),
        (RuntimeError("unable to mmap 128 bytes: Cannot allocate memory (12)"), Cause.MEMORY),
        (OSError(12, "Cannot allocate memory"), Cause.MEMORY),
        (OSError(28, "No space left on device"), Cause.SCRIPT),
        (torch.AcceleratorError("CUDA error: out of memory"), Cause.MEMORY),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), Cause.SCRIPT),
        (RuntimeError("CUDA error: device-side assert triggered"), Cause.SCRIPT),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), Cause.DEVICE),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), Cause.DEVICE),
        (torch.distributed.DistBackendError("NCCL error: Cuda failure 'out of memory'"), Cause.MEMORY),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
            Cause.NETWORK,
        ),
        (
            RuntimeError("[/gloo/transport/tcp/buffer.cc:72] Timed out waiting 10ms"),
            Cause.NETWORK,
        ),
        (RuntimeError("NCCL error: ncclRemoteError: A call failed possibly due to a loss"), Cause.NETWORK),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)"), Cause.SCRIPT),
        (ConnectionRefusedError(111, "Connection refused"), Cause.NETWORK),
        (TimeoutError("timed out"), Cause.NETWORK),
        (OSError(101, "Network is unreachable"), Cause.NETWORK),
        (OSError(110, "Connection timed out"), Cause.NETWORK),
        (OSError(113, "No route to host"), Cause.NETWORK),
        (socket.gaierror(-3, "Temporary failure in name resolution"), Cause.NETWORK),
        (URLError(socket.gaierror(-2, "Name or service not known")), Cause.NETWORK),
        (URLError(OSError(2, "No such file or directory")), Cause.SCRIPT),
        (URLError("unknown url type: htps"), Cause.SCRIPT),
        (HTTPError("http://data", 503, "Service Unavailable", Message(), None), Cause.NETWORK),
        (HTTPError("http://data", 404, "Not Found", Message(), None), Cause.SCRIPT),
        (ReadTimeout("HTTPSConnectionPool(host='data', port=443): Read timed out."), Cause.NETWORK),
        (OSError(5, "Input/output error", "/data/7.bin"), Cause.STORE),
        (OSError(116, "Stale file handle"), Cause.STORE),
        (FileNotFoundError(2, "No such file or directory", "/data/7.bin"), Cause.SCRIPT),
        (BrokenPipeError(32, "Broken pipe"), Cause.SCRIPT),
        (ConnectionResetError(104, "Connection reset by peer"), Cause.NETWORK),
        (torch.utils.checkpoint.CheckpointError("Recomputed values differ"), Cause.SCRIPT),
        (RendezvousLostError("it does not answer"), Cause.NETWORK),
        (
            torch.distributed.DistBackendError("NCCL error: ncclInvalidUsage: Duplicate GPU detected"),
            Cause.SCRIPT,
        ),
        (InjectedError("raise:worker=1"), Cause.INJECTED),
        (torch.distributed.DistBackendError("NCCL error"), Cause.NETWORK),
        (CheckpointError("part 3 is cut"), Cause.STORE),
        (GaveUpError("no way back is left"), Cause.RUNTIME),
    ],
)
def test_errors_have_a_cause_and_a_place(error: Exception, cause: Cause) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    found = whose_fault(raised.value)
    assert found["cause"] == cause
    (place,) = found["at"]
    assert place.startswith("test_causes.py:")
    assert place.endswith("in test_errors_have_a_cause_and_a_place")


def test_the_end_of_a_process_behind_a_local_pipe_is_no_error_of_a_network() -> None:
    """Of a ``Manager``, say."""
    mine, its = Pipe()
    mine.send("read by nobody")  # so that its end resets the connection
    its.close()
    with pytest.raises(ConnectionError) as raised:
        mine.send("more")
    assert whose_fault(raised.value)["cause"] == Cause.SCRIPT


def of_runtime(source: str) -> Any:
    """The function ``f`` of a source that stands for a file of the runtime's."""
    names: dict[str, Any] = {"__name__": "swift_ft.made"}
    exec(compile(source, str(Path(swift_ft.__file__).parent / "made.py"), "exec"), names)
    return names["f"]


DEEPER = "def f(*args):\n    return within(*args)\n\ndef within(*args):\n    "


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    return lost_name",
        "def f():\n    assert False",
        f"{DEEPER}return {{}}[args]",
        f"{DEEPER}return None.path",
        f"{DEEPER}import os; return os.no_such_name",
        f"class Own: pass\n{DEEPER}return Own().path",
        f"{DEEPER}return len(args) / 0",
    ],
)
def test_a_defect_in_the_runtimes_own_code_is_not_the_scripts(source: str) -> None:
    with pytest.raises((NameError, AssertionError, KeyError, AttributeError, ZeroDivisionError)) as raised:
        of_runtime(source)()
    found = whose_fault(raised.value)
    assert found["cause"] == Cause.RUNTIME
    place, defect = found["at"]
    assert place.endswith("in test_a_defect_in_the_runtimes_own_code_is_not_the_scripts")
    assert re.fullmatch(r"in swift_ft, made.py:\d+", defect)


def a_closure(*, of: int) -> None:
    """An argument too many for whoever calls it."""


def step(closure: Any) -> None:
    optimizer = swift_ft.wrap_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
    optimizer.step(closure)


def batch(index: Any) -> None:
    IndexedBatches(TensorDataset(torch.zeros(8)), batch_size=2)[index]


@pytest.mark.parametrize(
    ("given_to", "value"),
    [
        (step, a_closure),
        (step, 3),
        (batch, "a"),
        (swift_ft.wrap_optimizer, None),
        (of_runtime("def f(each):\n    return each['lr']"), {}),
        (of_runtime("def f(each):\n    return each[4]"), []),
        (of_runtime("def f(each):\n    return each.path"), None),
        (of_runtime("def f(each):\n    return 1 / each"), 0),
        (of_runtime(f"{DEEPER}return args[0]()"), a_closure),
        (of_runtime(f"{DEEPER}return args[0].path"), 3),
    ],
)
def test_a_value_that_the_runtime_cannot_use_is_the_scripts(
    given_to: Callable[[Any], object], value: object
) -> None:
    """A closure with other arguments, an index that is no number: its fault, and both lines are told."""
    with pytest.raises((TypeError, LookupError, AttributeError, ZeroDivisionError)) as raised:
        given_to(value)
    found = whose_fault(raised.value)
    assert found["cause"] == Cause.SCRIPT
    place, line = found["at"]
    assert place.startswith("test_causes.py:")
    assert re.fullmatch(r"in swift_ft, \w+.py:\d+", line)


def test_what_the_runtime_raises_on_purpose_names_a_mistake_of_the_script() -> None:
    with pytest.raises(AttributeError) as raised:
        swift_ft.no_such_name  # noqa: B018
    assert whose_fault(raised.value)["cause"] == Cause.SCRIPT


def test_an_error_of_torchs_in_the_runtimes_code_may_be_of_the_scripts_tensors() -> None:
    with pytest.raises(RuntimeError) as raised:
        tensor_digests({"weight": torch.empty(2, device="meta")})
    assert whose_fault(raised.value)["cause"] == Cause.SCRIPT


def test_the_place_of_an_error_is_in_the_users_own_code() -> None:
    """Torch raises it, and the line of the script that called torch is what a person can change."""
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(2) @ torch.zeros(3)
    (place,) = whose_fault(raised.value)["at"]
    assert place.endswith("in test_the_place_of_an_error_is_in_the_users_own_code")
