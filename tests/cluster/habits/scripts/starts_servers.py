"""A worker that starts servers, each at a port of its own, and is lost in its first life.

    starts_servers.py FOLDER PORT who

One server is in the worker's session. The other one is an orphan in a session of its own. ``who`` is killed:
the ``worker`` or its ``agent``; or the worker ``fails``. In its second life it needs the ports at once.
"""

import os
import signal
import socket
import sys
import threading
from pathlib import Path

from swift_ft.config.worker_context import WorkerContext
from tests.support.waiting import wait_until

folder, port, who = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ports = (port, port + 1)


def serve(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        (folder / str(port)).touch()
        threading.Event().wait(60.0)


def start(port: int, *, orphaned: bool) -> None:
    if os.fork() > 0:
        return
    if orphaned:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
    serve(port)
    os._exit(1)


context = WorkerContext.from_env()
if context.rank == 1 and not (folder / "lost").exists():
    start(port, orphaned=False)
    start(port + 1, orphaned=True)
    wait_until(lambda: all((folder / str(port)).exists() for port in ports), "both serve")
    (folder / "lost").touch()
    if who == "fails":
        sys.exit("the first life is over")
    os.kill(os.getpid() if who == "worker" else context.agent_pid, signal.SIGKILL)
    threading.Event().wait(60.0)
if context.rank == 1:
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()
    print("both ports are free", flush=True)
elif not (folder / "lost").exists():
    wait_until(lambda: (folder / "lost").exists(), "the other worker is lost")
    threading.Event().wait(60.0)
