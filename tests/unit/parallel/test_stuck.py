"""A worker that gloo does not wake ends; one that computes does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import os, sys, threading, time
import torch, torch.distributed as dist
from swift_ft import process_group
process_group.STUCK_S = 0.2
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
if os.fork() == 0:
    port, rank = store.port, 1
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=False, wait_for_workers=False)
else:
    rank = 0
group = process_group.GenerationGroup(store, rank=rank, world=2, timeout_s=20)
group._backend = "gloo"
group.join(1)
if rank == 1:
    os.close(1), os.close(2)
    threading.Event().wait(20)
    os._exit(0)
process_group._shut_down = lambda _: None  # gloo does not hear of it
threading.Timer(0.1, group.abort).start()
def busy():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
dist.recv(torch.zeros(1), 1) if sys.argv[1] == "waiting" else busy()
os._exit(7)
"""


@pytest.mark.parametrize(("doing", "code"), [("waiting", -signal.SIGKILL), ("computing", 7)])
def test_a_worker_after_an_abort(doing: str, code: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), doing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr[-2000:]
    assert ("does not let go" in done.stderr) == (doing == "waiting")
