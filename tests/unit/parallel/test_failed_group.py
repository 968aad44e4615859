"""A group that cannot be formed: it can be given up, and it leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

FAILED = """
import os, sys
import torch.distributed as dist
from swift_ft.process_group import GenerationGroup
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
alone = GenerationGroup(store, rank=0, world=2, timeout_s=0.2)
alone._backend = "gloo"
try:
    alone.join(1)
except (RuntimeError, dist.DistError):
    os.environ["FAILED"] = "1"
hook = sys.excepthook
whole = GenerationGroup(store, rank=0, world=1, timeout_s=20)
whole._backend = "gloo"
whole.join(2)
assert sys.excepthook is hook
print(os.environ["FAILED"], dist.group.WORLD.group_name)
"""


def test_the_next_group_has_the_name_that_a_newcomer_expects() -> None:
    """torch numbers groups, and counts those that failed."""
    command = [sys.executable, "-c", textwrap.dedent(FAILED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["1", "0"], done.stderr[-2000:]


TWO = """
import os, threading
from datetime import timedelta
import torch
import torch.distributed as dist
from swift_ft.process_group import GenerationGroup
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
lives, alive = os.pipe()
other = os.fork() == 0
if other:
    os.close(alive), os.close(1), os.close(2)
    store = dist.TCPStore("127.0.0.1", store.port, 1, is_master=False, wait_for_workers=False)
def keep_silent():
    os.read(lives, 1)  # until the first one has ended
    os._exit(0)
group = GenerationGroup(store, rank=int(other), world=2, timeout_s=20)
group._backend = "gloo"
group._followed.append(([0, 1], lambda _: None))  # as that of a pipeline
"""

FIRST_MESSAGE = """
isend = dist.isend
def tell(*message, **more):
    if other:
        keep_silent()
    threading.Timer(0.1, group.abort).start()
    return isend(*message, **more)  # one of the two listens: it waits here until the other one connects
dist.isend = tell
try:
    group.join_portion("1", (0, 1))
except RuntimeError as error:
    print(error)
os._exit(0)
"""

ADDRESS = """
if other:
    keep_silent()
threading.Timer(0.1, group.abort).start()
try:
    group.join(1)
except RuntimeError as error:
    print(error)
os._exit(0)
"""

PATIENCE = """
group._patience = timedelta(seconds=0.5)
group.join(1)
if other:
    keep_silent()
try:
    dist.recv(torch.zeros(1), 1)
except RuntimeError as error:
    print(error)
os._exit(0)
"""


def run_two(script: str) -> str:
    """What the first of two workers prints, while the other one keeps silent."""
    command = [sys.executable, "-c", TWO + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("script", [FIRST_MESSAGE, ADDRESS], ids=["first message", "address"])
def test_an_abort_ends_the_forming(script: str) -> None:
    """Otherwise a deadline would: the other one is there, and says nothing."""
    told = run_two(script)
    assert "connections were aborted" in told or "Connection closed" in told, told


def test_a_message_may_take_as_long_as_the_script_allows() -> None:
    """And not as long as the forming of a group."""
    assert "Timed out waiting 500ms for recv" in run_two(PATIENCE)
