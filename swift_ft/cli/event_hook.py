"""``--on-event COMMAND``: runs a command for each event that someone should hear of (docs/events.md)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable

from torch.distributed import DistError

from swift_ft.cli.event_stream import Line
from swift_ft.config import store_keys
from swift_ft.errors import SwiftError
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

HOOK_S = 20.0
"""The longest time that one run of the command may take."""
_WAITING = 64
"""Events that may wait for the command. It runs for one after the other."""
_GOOD_NEWS = frozenset({"run_ended"})
_OWN = frozenset({"hook_failed"})


class EventHook:
    """Runs the command in a thread of its own: it delays nothing but the next run of the command.

    Several launchers read the same journal. The one that first claims an entry's event in the rendezvous
    store runs the command for it; if the store does not answer, each of them does.

    Args:
        command: for ``sh -c``; the line comes on stdin.
        on_failed: called once, in the hook's thread, when the command fails or takes too long, or when
            events come too fast for it.
        limit_s: how long one run of the command may take.
    """

    def __init__(self, command: str, on_failed: Callable[[str], None], *, limit_s: float = HOOK_S) -> None:
        self._command = command
        self._on_failed = on_failed
        self._limit_s = limit_s
        self._name = uuid.uuid4().hex
        self._connect: Callable[[], RendezvousStore] | None = None
        self._store: RendezvousStore | None = None  # owner: the hook's thread
        self._failed = False
        self._stops_at = float("inf")  # monotonic
        self._lines: queue.Queue[Line | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run_all, name="swift-hook", daemon=True)
        self._thread.start()

    def agree_in(self, connect: Callable[[], RendezvousStore]) -> None:
        """From now on, agree with other launchers about who runs the command.

        Args:
            connect: opens a client of the rendezvous store; called in the hook's thread, and soon gives up.
        """
        self._connect = connect

    def __call__(self, line: Line) -> None:
        """Run the command for a line, soon, if someone should hear of it. Returns at once."""
        wanted = line["level"] != "info" or line["event"] in _GOOD_NEWS
        if not wanted or line["event"] in _OWN:
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._fail(f"{_WAITING} events wait for the command already: {line['event']} is left out")

    def close(self, limit_s: float = HOOK_S) -> None:
        """Run the command for what still waits, as far as the time allows; then kill it."""
        self._stops_at = time.monotonic() + limit_s
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=limit_s)
        self._thread.join(max(0.0, self._stops_at - time.monotonic()) + 1.0)

    def _run_all(self) -> None:
        while (line := self._lines.get()) is not None:
            if time.monotonic() < self._stops_at and self._is_ours(line):
                self._run(line)

    def _is_ours(self, line: Line) -> bool:
        if self._connect is None or line["position"] is None:
            return True
        key = store_keys.hook(line["position"], line["event"])
        try:
            self._store = self._store or self._connect()
            return self._store.compare_set(key, "", self._name).decode() == self._name
        except (SwiftError, DistError, RuntimeError):
            return True  # better twice than never

    def _run(self, line: Line) -> None:
        try:
            process = subprocess.Popen(
                self._command,
                shell=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a deadline ends its children, too
            )
        except OSError as error:
            self._fail(str(error))
            return
        limit_s = max(0.0, min(self._limit_s, self._stops_at - time.monotonic()))
        try:
            _, errors = process.communicate(json.dumps(line).encode() + b"\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            self._fail(f"it was killed after {limit_s:g} s")
            return
        if process.returncode:
            said = errors.decode(errors="replace").strip().splitlines()
            self._fail(f"exit code {process.returncode}" + (f": {said[-1]}" if said else ""))

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._on_failed(f"the command of --on-event failed: {reason}. The run continues.")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and what it has started, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
