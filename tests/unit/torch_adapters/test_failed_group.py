"""A group that cannot be formed: it can be given up, and it leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = """
import functools, os, sys, threading, weakref
from datetime import timedelta
print = functools.partial(print, flush=True)  # some end without leaving the interpreter
import torch
import torch.distributed as dist
from swift_ft.torch_adapters.comm_errors import is_broken_communication
from swift_ft.torch_adapters.process_group import GenerationGroup
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_adapters.script_groups import script_groups
server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
def init(rank, world_size, timeout=timedelta(seconds=60)):  # as a script does, but waits for no one
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    script_groups.install()
    store = dist.PrefixStore("script", dist.TCPStore("127.0.0.1", server.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    command = [sys.executable, "-c", MODULES + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


FAILED = """
init(0, 2)
world = dist.group.WORLD
group = GenerationGroup(RendezvousStore(server.clone), rank=0, world_size=2, timeout_s=0.2)
for generation in (1, 2):
    try:
        group.join(generation)
    except (RuntimeError, dist.DistError) as error:
        print(type(error).__name__, "without", group.missing())
assert dist.group.WORLD is world
assert dist.distributed_c10d._resolve_process_group("0") is world
print(world.group_name, world.rank(), world.size(), dist.get_process_group_ranks(world))
try:
    dist.barrier()
except RuntimeError as error:
    print(error)
"""


def test_the_script_keeps_its_group_when_the_next_one_cannot_be_formed() -> None:
    done = run(FAILED)
    assert done.stdout.splitlines() == [
        "RuntimeError without [1]",
        "RuntimeError without [1]",
        "0 0 2 [0, 1]",
        "the process group has ended with its generation: a worker was lost",
    ], done.stderr[-2000:]


TWO = """
lives, alive = os.pipe()
other = os.fork() == 0
if other:
    os.close(alive), os.close(1), os.close(2)
store = RendezvousStore(lambda: dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=300)))
def keep_silent():
    os.read(lives, 1)  # until the first one has ended
    os._exit(0)
init(int(other), 2, TIMEOUT)
group = GenerationGroup(store, rank=int(other), world_size=2, timeout_s=20)
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
    group.join_replay_group("1", (0, 1))
except RuntimeError as error:
    print(error)
os._exit(0)
"""

ADDRESS = """
if other:
    keep_silent()
# Gloo asks the store for the other one's address as long as the script allows.
threading.Timer(0.1, group.abort).start()
try:
    group.join(1)
except (RuntimeError, dist.DistError) as error:
    print(error)
store.set("the next group", "is due")
print(store.get("the next group"))
os._exit(0)
"""

PATIENCE = """
group.join(1)
if other:
    keep_silent()
try:
    dist.recv(torch.zeros(1), 1)
except RuntimeError as error:
    print(error, is_broken_communication(error))
os._exit(0)
"""

DEATH = """
group.join(1)
if other:
    os._exit(0)
try:
    while True:
        dist.all_reduce(torch.zeros(1))
except RuntimeError as error:
    print(error, is_broken_communication(error))
os._exit(0)
"""


def run_two(script: str, timeout: str = "timedelta(minutes=30)") -> str:
    """What the first of two workers prints, while the other one keeps silent."""
    done = run(f"TIMEOUT = {timeout}\n{TWO}{script}")
    assert done.stdout, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("script", [FIRST_MESSAGE, ADDRESS], ids=["first message", "address"])
def test_an_abort_ends_the_forming(script: str) -> None:
    """Otherwise a deadline would: the other one is there, and says nothing."""
    output = run_two(script)
    ends = ("connections were aborted", "Connection closed", "Connection was likely closed")
    assert any(end in output for end in ends), output


def test_an_abort_frees_the_store() -> None:
    """The thread that forms the group waits in the store for an address that never comes."""
    assert "is due" in run_two(ADDRESS)


def test_a_message_may_take_as_long_as_the_script_allows() -> None:
    """And not as long as the forming of a group."""
    output = run_two(PATIENCE, "timedelta(seconds=0.5)")
    assert "Timed out waiting 500ms for recv" in output
    assert output.rstrip().endswith("True")  # it is broken communication


def test_a_dead_peer_is_broken_communication() -> None:
    """Before anything is aborted: gloo's own words tell it."""
    output = run_two(DEATH)
    assert "gloo/transport/" in output
    assert output.rstrip().endswith("True")


RETIRED = """
init(0, 1)
group = GenerationGroup(RendezvousStore(server.clone), rank=0, world_size=1, timeout_s=20)
held = []
group.follow(dist.group.WORLD, lambda new: held.__setitem__(slice(None), [new]))  # as the stages do
group.join(1)
assert held == [dist.group.WORLD.native]
never, destroyed = threading.Event(), threading.Event()
def hang():
    print(threading.current_thread().name, flush=True)
    destroyed.set()
    never.wait()  # as gloo's destructor does, rarely
weakref.finalize(dist.group.WORLD.native, hang).atexit = False
group.join(2)
assert not destroyed.is_set()  # all others may wait for this worker now
group.destroy_left()
assert destroyed.wait(20)
print("goes on")
"""


def test_no_one_waits_for_the_destructor_of_a_group() -> None:
    """It may hang for ever, once a thread has waited in vain for a peer that died."""
    done = run(RETIRED)
    assert done.stdout.splitlines() == ["swift-retired-groups", "goes on"], done.stderr[-2000:]


DEVICES = """
init(0, 2, timedelta(seconds=7))
made, plain = [], dist.distributed_c10d.ProcessGroupGloo
class Noted(plain):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        made.append((len(args) == 4, len(self.options._devices), self.options._timeout.seconds))
dist.distributed_c10d.ProcessGroupGloo = Noted
group = GenerationGroup(RendezvousStore(server.clone), rank=0, world_size=2, timeout_s=20)
for name in "ab":
    group.join_replay_group(name, ())
    print("apart", made.pop())
group._begin("groups/1", lazily=False)
for name in "cd":
    with group._forming():
        script_groups.form(name, [0], group._store)
    print("at once", made[-1])
group.join_replay_group("e", ())
print("apart", made[-1])
"""


def test_groups_that_connect_at_once_share_a_device() -> None:
    """Whether it connects at once is a property of the device. The timeout is the script's, as ever."""
    done = run(DEVICES)
    assert done.stdout.splitlines() == [
        "apart (False, 1, 7)",
        "apart (False, 1, 7)",
        "at once (False, 1, 7)",
        "at once (True, 1, 7)",
        "apart (False, 1, 7)",
    ], done.stderr[-2000:]
