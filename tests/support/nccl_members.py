"""Members of small groups, each a process of its own, that check statements about NCCL.

A server imports torch once and forks the members: ``python -m tests.support.nccl_members``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

DEADLINE_S = 60.0
PATIENCE_S = 0.3
"""How long a test looks at what must not happen."""
_LOOK_S = 0.002


@dataclass(frozen=True)
class Backend:
    """What the statements are about.

    Attributes:
        name: for ``init_process_group``.
        device: of the tensors.
        large_bytes: of a message that no buffer of the backend takes.
        timeout_s: with which a watchdog may end a process in the time of a test.
        env: variables of each member; ``{rank}`` stands for its number.
    """

    name: str
    device: str
    large_bytes: int
    timeout_s: float
    env: Mapping[str, str]


_WAITS = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "5", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}

LIKE_NCCL = Backend("nccl_like", "cpu", large_bytes=1 << 16, timeout_s=0.2, env=_WAITS)

GPU = Backend(
    "nccl",
    "cuda",
    large_bytes=1 << 26,
    timeout_s=2.0,
    env={  # several members share a GPU if each says that it is on a host of its own
        "NCCL_HOSTID": "host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        **_WAITS,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    },
)


@dataclass(frozen=True)
class Ended:
    """How the members of a statement ended: exit codes, negative for a signal, and what all have written."""

    codes: list[int]
    output: str


class Member:
    """One member. Statements use it to do what differs between devices.

    Args:
        backend: of the group.
        rank: its number.
        size: of the group.
        store: in which members meet, and tell each other things.
    """

    def __init__(self, backend: Backend, rank: int, size: int, store: dist.Store) -> None:
        self.backend, self.rank, self.size = backend, rank, size
        self.store = store
        self._told = dist.PrefixStore("told", store)
        self.device = torch.device(backend.device, 0) if backend.device != "cpu" else torch.device("cpu")

    def begin(self, name: str = "group", *, size: int | None = None) -> Any:
        """Make the default group, with the members from 0 to ``size``. Returns it."""
        dist.init_process_group(
            self.backend.name,
            store=dist.PrefixStore(name, self.store),
            rank=self.rank,
            world_size=size or self.size,
            timeout=timedelta(minutes=10),
        )
        return dist.group.WORLD

    def tensor(self, value: float, nbytes: int = 16) -> torch.Tensor:
        """Of one value."""
        return torch.full((nbytes // 4,), float(value), device=self.device)

    def values(self, tensor: torch.Tensor) -> set[float]:
        """The values in a tensor."""
        return {*tensor.tolist()}

    def under_way(self, work: Any) -> Callable[[], bool]:
        """Whether an operation is over: what the device says, and not what torch makes of it."""
        if self.device.type == "cpu":
            return lambda: bool(work.is_completed() and work.wait())
        work.wait()
        event = torch.cuda.Event()
        event.record()
        return event.query

    def tell(self, what: str) -> None:
        """Say something to all members."""
        self._told.set(what, "")

    def told(self, what: str) -> None:
        """Wait until a member has said something."""
        self._told.wait([what], timedelta(seconds=DEADLINE_S))

    def leave(self) -> None:
        """Say that this member ends."""
        self._told.set(f"left {self.rank}", "")

    def wait_for_the_end(self, ranks: Iterable[int]) -> None:
        """Wait until these members end, too: an operation that is over here may still be under way there."""
        self._told.wait([f"left {rank}" for rank in ranks], timedelta(seconds=DEADLINE_S))

    def die(self) -> NoReturn:
        """As a lost machine does."""
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def reads(self, what: str) -> str:
        """What a member has said under a name."""
        return self._told.get(what).decode()

    def writes(self, what: str, value: str) -> None:
        """Say something under a name."""
        self._told.set(what, value)


def ends(over: Callable[[], bool]) -> None:
    """Check that something comes."""
    deadline = time.monotonic() + DEADLINE_S
    while not over():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(_LOOK_S)


def stays(over: Callable[[], bool]) -> None:
    """Check that something does not come while a test can wait."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert not over(), "it came"
        time.sleep(_LOOK_S)


def in_thread(function: Callable[[], object]) -> Callable[[], bool]:
    """Call a function that may block; returns whether it has returned, or raised."""
    thread = threading.Thread(target=_quiet, args=(function,), daemon=True)
    thread.start()
    return lambda: not thread.is_alive()


def _quiet(function: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        function()


class Statements:
    """Runs statements in processes that a server forks.

    Args:
        backend: that they are about.
    """

    def __init__(self, backend: Backend) -> None:
        command = [sys.executable, "-m", "tests.support.nccl_members", backend.name]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )

    def run(self, name: str, members: int) -> Ended:
        """Let each member run a function of :mod:`tests.support.nccl_statements`, or of ``nccl_groups``."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([name, members]).encode() + b"\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, "the server of members has ended"
        return Ended(**json.loads(line))

    def close(self) -> None:
        """End the server."""
        self._server.communicate(timeout=DEADLINE_S)


def _serve(backend: Backend) -> None:
    for line in sys.stdin:
        name, size = json.loads(line)
        print(json.dumps(_run(backend, name, size)), flush=True)


def _run(backend: Backend, name: str, size: int) -> dict[str, Any]:
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        members = [_fork(backend, name, rank, size, f"{folder}/store", writing) for rank in range(size)]
        os.close(writing)
        output = b"".join(_read(reading, time.monotonic() + DEADLINE_S))
        os.close(reading)
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # only if the deadline has passed
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in members]
    return {"codes": codes, "output": output.decode(errors="replace")}


def _read(fd: int, deadline: float) -> Iterator[bytes]:
    """Until all members have ended."""
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0] and (
        piece := os.read(fd, 1 << 16)
    ):
        yield piece


def _fork(backend: Backend, name: str, rank: int, size: int, store: str, output: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.update({key: value.format(rank=rank) for key, value in backend.env.items()})
        from tests.support import nccl_groups, nccl_statements

        member = Member(backend, rank, size, dist.FileStore(store))
        try:
            getattr(nccl_statements if hasattr(nccl_statements, name) else nccl_groups, name)(member)
        finally:
            member.leave()
        member.wait_for_the_end({*range(size)} - nccl_statements.dying(name))
        code = 0
    except BaseException:  # what an interpreter would print
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    chosen = {backend.name: backend for backend in (LIKE_NCCL, GPU)}[sys.argv[1]]
    if chosen is LIKE_NCCL:
        from swift_ft.testing import nccl_like

        nccl_like.register()
    _serve(chosen)
