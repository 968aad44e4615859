"""The network to the rendezvous store is cut for a while: it is used again as soon as it is there again."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.support.network import Host, swallowed, two_hosts
from tests.support.waiting import wait_until

_SCRIPT = Path(__file__).with_name("scripts") / "asks_the_store.py"
_CUT_S = 7.2
"""TCP repeats what it sent ever more seldom: the last time in this cut after 6.6 s, and then after 13 s."""
_BACK_S = 5.0


def start(host: Host, *line: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(host.command(sys.executable, *line), env=env)


def repeats_soon() -> bool:
    """Whether the kernel can be told how long TCP waits at most before it sends once more."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.IPPROTO_TCP, 44, 2000)
        return True
    return False


def test_it_is_back_when_the_network_is(tmp_path: Path) -> None:
    def answers(name: str) -> int:
        file = tmp_path / name
        return file.read_text().count("\n") if file.exists() else 0

    with two_hosts() as (first, second):
        processes = [start(first, "-m", "swift_ft.cli.store", "--port", "29444")]
        try:
            processes.append(start(second, str(_SCRIPT), f"{first.address}:29444", str(tmp_path)))
            wait_until(lambda: min(answers("lasting"), answers("group")) > 2, "its first answers")
            with swallowed(first, second):
                before = answers("lasting"), answers("group")
                time.sleep(_CUT_S)  # the fault itself: nothing tells how long TCP will be silent
                during = answers("lasting"), answers("group")
                assert max(after - had for had, after in zip(before, during, strict=True)) <= 1
            wait_until(lambda: answers("lasting") > during[0] + 1, "an answer to a client", _BACK_S)
            if repeats_soon():
                wait_until(lambda: answers("group") > during[1] + 1, "an answer to a group", _BACK_S)
            else:
                print("a kernel before Linux 6.15 cannot bound TCP's waits: a group's connection is slow")
            (tmp_path / "go").touch()
            wait_until(lambda: answers("waiter"), "the end of a wait", _BACK_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
