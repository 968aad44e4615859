"""A group that cannot be formed: it can be given up, and it leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import textwrap

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


SILENT = """
import os, threading
import torch.distributed as dist
from swift_ft.process_group import GenerationGroup
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
lives, alive = os.pipe()
if os.fork() == 0:
    os.close(alive), os.close(1), os.close(2)
    port, rank = store.port, 1
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=False, wait_for_workers=False)
    dist.isend = lambda *_, **__: os.read(lives, 1) or os._exit(0)  # when the other one has ended
else:
    rank = 0
group = GenerationGroup(store, rank=rank, world=2, timeout_s=20)
group._backend = "gloo"
group._followed.append(([0, 1], lambda _: None))  # as that of a pipeline
isend = dist.isend
def tell(*message, **more):  # the other one has all that it needs to be connected
    work = isend(*message, **more)
    threading.Timer(0.5, group.abort).start()
    return work
if rank == 0:
    dist.isend = tell
try:
    group.join_portion("1", (0, 1))
except RuntimeError as error:
    print(error)
os._exit(0)
"""


def test_an_abort_ends_the_first_exchange_of_those_who_replay() -> None:
    """Otherwise torch's own deadline would: the other one is there, and says nothing."""
    command = [sys.executable, "-c", textwrap.dedent(SILENT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr[-2000:]
    assert "Timed out" not in done.stdout, done.stdout
