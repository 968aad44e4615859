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
from swift_ft.torch_adapters import process_group, transports
from swift_ft.torch_adapters.abortable_waits import wait_for_works
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_adapters.script_groups import script_groups
transports.STUCK_S = 0.2
server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
if os.fork() == 0:
    rank = 1
else:
    rank = 0
store = RendezvousStore(lambda: dist.TCPStore("127.0.0.1", server.port))
script_groups.install()
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", server.port), rank=rank, world_size=2)
group = process_group.GenerationGroup(store, rank=rank, world_size=2, timeout_s=20)
group.join(1)
if rank == 1:
    os.close(1), os.close(2)
    threading.Event().wait(20)
    os._exit(0)
transports.shut_down = lambda _: None  # gloo never sees the abort
threading.Timer(0.1, group.abort).start()
def busy():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
def wait():  # as a transfer of state does, in this thread
    wait_for_works([script_groups.default.native.recv([torch.zeros(1)], 1, 0)])
wait() if sys.argv[1] == "waiting" else busy()
os._exit(7)
"""


@pytest.mark.parametrize(("doing", "code"), [("waiting", -signal.SIGKILL), ("computing", 7)])
def test_a_worker_after_an_abort(doing: str, code: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), doing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr[-2000:]
    assert ("gloo did not end a wait" in done.stderr) == (doing == "waiting")
