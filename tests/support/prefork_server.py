"""Imports what ``swift-run`` and its workers need, and forks a launcher at each request of a test process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from swift_ft.cli.run import run_and_exit
from swift_ft.launch.processes.preload import preload

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.02
_ENDING_S = 5.0
"""What has lost its parent may still be about to end."""
_MAX_REQUEST = 1 << 18


def main(requests: socket.socket) -> None:
    """Serve until the test process ends."""
    preload()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 2)
        if not request:
            return
        _reap()
        if os.fork() == 0:
            requests.close()
            _keep(json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(request: dict[str, Any], output: int, control_fd: int) -> NoReturn:
    """The keeper: it forks the launcher, is the parent of all that loses its own, and tells what is left."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    control = socket.socket(fileno=control_fd)
    launcher = os.fork()
    if launcher == 0:
        control.close()
        _become_launcher(request, output)
    os.close(output)
    control.send(json.dumps({"pid": os.getpid()}).encode())
    code: int | None = None
    while True:
        code = _reap().get(launcher, code)
        if code is None:
            time.sleep(_LOOK_S)
        elif select.select([control], [], [], _LOOK_S)[0]:
            if control.recv(64):  # and not the test's end
                control.send(json.dumps({"code": code, "left": _left_behind()}).encode())
            os._exit(0)


def _reap() -> dict[int, int]:
    """The exit codes of children that have ended, by process."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _left_behind() -> list[int]:
    deadline = time.monotonic() + _ENDING_S
    while True:
        _reap()
        left = _children()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_LOOK_S)


def _children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(child) for child in text.split()]


def _become_launcher(request: dict[str, Any], output: int) -> NoReturn:
    """What a new interpreter would start with: its own session, environment, folder, arguments, seed."""
    try:
        os.setsid()
        os.chdir(request["folder"])
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:0] = [
            path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in known
        ]
        sys.argv = ["swift-run", *request["arguments"]]
        tempfile.tempdir = None
        random.seed()
        run_and_exit()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:  # what an interpreter would do
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
