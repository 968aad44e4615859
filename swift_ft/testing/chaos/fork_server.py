"""Imports what ``swift-run`` and its workers need, and forks a launcher at each request.

    python -m swift_ft.testing.chaos.fork_server SOCKET

Whoever asks (:mod:`~swift_ft.testing.chaos.forked_launchers`) talks to a keeper, a process between this one
and the launcher. It ends the launcher when nobody is left who asked for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from swift_ft.launch.processes.preload import preload
from swift_ft.launch.processes.strays import adopt_orphans
from swift_ft.program.system_exit import exit_code
from swift_ft.testing.chaos.leftovers import MARK

_COMMAND = "swift_ft.cli.run"
_ENTRY = "swift_ft.cli.start"
"""The command's beginning. This kit stands beside the commands and imports none: it runs one."""
_THREADS = Path("/proc/self/task")
_FORKED = "jemalloc_bg_thd"
"""The thread of an allocator (pyarrow's), which has handlers for a fork."""
_ENV_START = 47
"""The place of ``env_start`` in ``/proc/self/stat``, behind the name."""
_LOOK_S = 0.02
_GRACE_S = 20.0
_ENDING_S = 5.0
"""A process that has lost its parent may still be about to end."""
_MAX_REQUEST = 1 << 18


def main(requests: socket.socket) -> None:
    """Serve until nobody can ask any more."""
    before = dict(os.environ)
    importlib.import_module(_COMMAND)
    importlib.import_module(_ENTRY)
    preload()
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 2)
        if not request:
            return
        _reap()
        if threads := _other_threads():
            raise RuntimeError(f"a process that is forked would lack the threads {', '.join(threads)}")
        if os.fork() == 0:
            requests.close()
            asked = json.loads(request)
            _keep({**asked, "env": {**set_by_imports, **asked["env"]}}, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _other_threads() -> list[str]:
    """The names of all threads but this one that a fork would not take along."""
    others = [path for path in _THREADS.iterdir() if path.name != str(os.getpid())]
    return [name for path in others if (name := (path / "comm").read_text().strip()) != _FORKED]


def _keep(request: dict[str, Any], output: int, control_fd: int) -> NoReturn:
    """The keeper: parent of launchers, and of all that loses its own. It tells how a launcher ends."""
    adopt_orphans()
    control = socket.socket(fileno=control_fd)
    launcher = os.fork()
    if launcher == 0:
        control.close()
        _become_launcher(request, output)
    os.close(output)
    _tell(control, pid=launcher, keeper=os.getpid())
    code = _end_of(launcher, control)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    _tell(control, code=code, cpu_s=used.ru_utime + used.ru_stime)
    with contextlib.suppress(ConnectionError):
        if control.recv(64):
            _tell(control, left=_left_behind())
    os._exit(0)


def _tell(control: socket.socket, **facts: object) -> None:
    with contextlib.suppress(ConnectionError):  # nobody is left who wants to know, as the next look shows
        control.send(json.dumps(facts).encode())


def _end_of(launcher: int, control: socket.socket) -> int:
    """Wait for the launcher's end. Once nobody is left who asked for it, end all that it has started."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while (code := _reap().get(launcher)) is None:
        ready, _, _ = select.select([reading, control.fileno()], [], [])
        if control.fileno() in ready:  # nothing is sent to a keeper before it has told the code: the end
            _end_all(launcher)
        with contextlib.suppress(BlockingIOError):
            os.read(reading, 4096)
    return code


def _end_all(launcher: int) -> NoReturn:
    """By SIGTERM, on which a launcher ends its processes; then what is left by SIGKILL."""
    os.kill(launcher, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while launcher not in _reap() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    deadline = time.monotonic() + _ENDING_S
    while (left := _children()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
        _reap()
    os._exit(1)


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
    """Start with what a new interpreter has, but for its seed of hashes, which is this process's.

    Its own session, environment, folder, search path, arguments and random numbers.
    """
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        environment: dict[str, str] = request["env"]
        sys.path[:] = _search_path(environment, request["folder"])
        os.chdir(request["folder"])
        _show_mark(environment)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["swift-run", *request["arguments"]]
        tempfile.tempdir = None
        random.seed()
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
        importlib.import_module(_ENTRY).run_and_exit()
    except SystemExit as end:
        code = exit_code(end)
        sys.stdout.flush()
        os._exit(code)
    except BaseException:  # what an interpreter would do
        traceback.print_exc()
    os._exit(1)


def _search_path(environment: Mapping[str, str], folder: str) -> list[str]:
    """The places where ``python -m`` looks in another folder, with another PYTHONPATH."""
    own = [] if sys.flags.safe_path else [folder]
    known = set(_paths_in(os.environ, str(Path.cwd())))
    rest = [path for path in sys.path[len(own) :] if path not in known]
    return [*own, *dict.fromkeys(_paths_in(environment, folder)), *rest]


def _paths_in(environment: Mapping[str, str], folder: str) -> list[str]:
    named = environment.get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.normpath(os.path.join(folder, path)) for path in named if path]  # noqa: PTH118  (as site)


def _show_mark(environment: Mapping[str, str]) -> None:
    """Let ``/proc/PID/environ`` show the run's folder, here and in what is forked from here.

    The kernel shows the memory that held the environment when the program began. There a longer value of
    the same variable takes the room for this one.
    """
    if (folder := environment.get(MARK)) is None:
        return
    shown = Path("/proc/self/environ").read_bytes()
    began = (b"\0" + shown).index(f"\0{MARK}=".encode())
    room = shown.index(b"\0", began) - began
    text = f"{MARK}={folder}".encode(errors="surrogateescape")
    if len(text) > room:
        raise ValueError(f"The path of the run's folder is too long, with {len(text)} bytes: {folder}")
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ctypes.memmove(int(stat[_ENV_START]) + began, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
