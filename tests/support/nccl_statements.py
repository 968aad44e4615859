"""What recovery takes for granted of NCCL: one function for a statement, run by each member of a group.

The same functions run over the backend that behaves like NCCL, and over NCCL where there is a GPU.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from swift_ft.torch_adapters.versions.coalescing import COALESCES_ITSELF
from tests.support.nccl_members import DEADLINE_S, Member, ends, in_thread, stays

__all__ = ["MEMBERS", "STATEMENTS", "expected_codes"]

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

STATEMENTS = {
    "returns_when_enqueued": "An operation returns when it is enqueued.",
    "runs_in_order": "Operations of a communicator run in the order in which they were enqueued.",
    "forms_at_the_first_operation": "Making a group waits for no one; its first operation waits for all.",
    "forming_ends": "The wait for a member that never comes ends after its own timeout, at the latest.",
    "a_dead_peer_is_silent": "No wait ends because a peer has died.",
    "abort_ends_a_wait": "An abort ends a wait, and raises nothing where the wait was.",
    "abort_ends_a_wait_for_an_absent_peer": "So it does if the peer is alive and does not take part.",
    "an_abort_is_final": "After an abort, each operation on the group raises.",
    "an_abort_is_of_one_group": "Other groups of the same members go on.",
    "an_abort_waits_for_the_device": (
        "An abort waits for operations of other groups, and aborts side by side end."
    ),
    "another_group_after_an_abort": "Survivors can form another group after an abort.",
    "aborted_groups_leave_nothing": "Aborted groups leave no threads and no open files behind.",
    "both_send_first": "Two members that both send first get no further.",
    "a_batch_sends_and_receives": "In a batch, sends and receives wait for nothing but each other.",
    "messages_need_a_pair_only": "A message outside of a batch needs no third member.",
    "a_batch_needs_all_at_first": "The first batch on a group waits for all of its members.",
    "tags_mean_nothing": "Messages of a pair match in their order, whatever their tags.",
    "nobody_receives_from_anyone": "A receive names its sender.",
    "torch_trains_over_it": "DDP, FSDP2 and 1F1B train over it.",
    "the_watchdog_ends_the_process": "An operation that takes too long ends the process.",
    "the_watchdog_can_be_switched_off": f"It does not where `{HANDLING}=0`.",
}
"""By the name of the function that checks it."""

MEMBERS = {"messages_need_a_pair_only": 3, "a_batch_needs_all_at_first": 3, "another_group_after_an_abort": 3}
"""How many take part; two in all others."""

_SIGNALS = {
    "a_dead_peer_is_silent": {1: signal.SIGKILL},
    "abort_ends_a_wait": {1: signal.SIGKILL},
    "another_group_after_an_abort": {2: signal.SIGKILL},
    "the_watchdog_ends_the_process": {0: signal.SIGABRT},
}
"""Members that do not end by themselves, and how."""


def dying(name: str) -> set[int]:
    """The members of a statement that end by a signal."""
    return {*_SIGNALS.get(name, {})}


def expected_codes(name: str) -> list[int]:
    """How the members of a statement end, if it is true: with 0, or by a signal."""
    signals = _SIGNALS.get(name, {})
    return [-signals[rank] if rank in signals else 0 for rank in range(MEMBERS.get(name, 2))]


def _formed(me: Member, name: str = "group") -> dist.ProcessGroup:
    """The default group, with its communicator."""
    group: dist.ProcessGroup = me.begin(name)
    dist.barrier()
    return group


def returns_when_enqueued(me: Member) -> None:
    _formed(me)
    tensor = me.tensor(1.0)
    if me.rank == 1:
        me.told("enqueued")
    over = me.under_way(dist.all_reduce(tensor, async_op=True))
    if me.rank == 0:
        assert not over()
        me.tell("enqueued")
    ends(over)
    assert me.values(tensor) == {2.0}


def runs_in_order(me: Member) -> None:
    _formed(me)
    first, second = me.tensor(1.0), me.tensor(10.0)
    first_over = me.under_way(dist.all_reduce(first, async_op=True))
    if me.rank == 1:
        me.told("second is enqueued, and not over")
    second_over = me.under_way(dist.all_reduce(second, async_op=True))
    if me.rank == 0:
        ends(first_over)
        stays(second_over)
        me.tell("second is enqueued, and not over")
    ends(second_over)
    assert (me.values(first), me.values(second)) == ({2.0}, {20.0})


def forms_at_the_first_operation(me: Member) -> None:
    if me.rank == 1:
        me.told("begun")
    me.begin()
    tensor = me.tensor(1.0)
    returned = in_thread(lambda: me.under_way(dist.all_reduce(tensor, async_op=True)))
    if me.rank == 0:
        stays(returned)
        me.tell("begun")
    ends(returned)
    ends(lambda: me.values(tensor) == {2.0})


def forming_ends(me: Member) -> None:
    """An abort of NCCL waits for a communicator that forms."""
    if me.rank == 1:
        me.told("aborted")
        return
    group = me.begin()
    returned = in_thread(lambda: dist.all_reduce(me.tensor(1.0), async_op=True))
    stays(returned)
    aborted = in_thread(group.abort)
    ends(returned)
    ends(aborted)
    me.tell("aborted")


def a_dead_peer_is_silent(me: Member) -> None:
    _formed(me)
    if me.rank == 1:
        _die(me, [0])
    over = me.under_way(dist.all_reduce(me.tensor(1.0), async_op=True))
    _dead(me)
    stays(over)


def abort_ends_a_wait(me: Member) -> None:
    group = _formed(me)
    tensor = me.tensor(1.0)
    if me.rank == 1:
        _die(me, [0])
    work = dist.all_reduce(tensor, async_op=True)
    over = me.under_way(work)
    _dead(me)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
            if me.device.type == "cuda":
                torch.cuda.synchronize()
        except BaseException as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    stays(over)
    group.abort()
    ends(over)
    waiting.join()
    assert not raised, raised


def abort_ends_a_wait_for_an_absent_peer(me: Member) -> None:
    group = _formed(me)
    if me.rank == 1:
        me.told("aborted")
        return
    over = me.under_way(dist.all_reduce(me.tensor(1.0), async_op=True))
    stays(over)
    group.abort()
    ends(over)
    me.tell("aborted")


def an_abort_is_final(me: Member) -> None:
    group = _formed(me)
    group.abort()
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match="abort"):
            dist.all_reduce(me.tensor(1.0), async_op=True)


def an_abort_is_of_one_group(me: Member) -> None:
    _formed(me)
    other = dist.new_group()
    assert isinstance(other, dist.ProcessGroup)
    dist.all_reduce(me.tensor(1.0), group=other)
    other.abort()
    tensor = me.tensor(1.0)
    ends(me.under_way(dist.all_reduce(tensor, async_op=True)))
    assert me.values(tensor) == {2.0}


def an_abort_waits_for_the_device(me: Member) -> None:
    group = _formed(me)
    other = dist.new_group()
    assert isinstance(other, dist.ProcessGroup)
    dist.all_reduce(me.tensor(1.0), group=other)
    dist.barrier()
    if me.rank == 1:
        me.told("aborted")
        return
    overs = [me.under_way(dist.all_reduce(me.tensor(1.0), group=of, async_op=True)) for of in (group, other)]
    first = in_thread(group.abort)
    stays(overs[1])
    second = in_thread(other.abort)
    for over in (first, second, *overs):
        ends(over)
    me.tell("aborted")


def another_group_after_an_abort(me: Member) -> None:
    group = _formed(me)
    if me.rank == 2:
        _die(me, [0, 1])
    over = me.under_way(dist.all_reduce(me.tensor(1.0), async_op=True))
    _dead(me)
    group.abort()
    ends(over)
    dist.destroy_process_group()
    me.begin("another", size=2)
    tensor = me.tensor(1.0)
    ends(me.under_way(dist.all_reduce(tensor, async_op=True)))
    assert me.values(tensor) == {2.0}


def aborted_groups_leave_nothing(me: Member) -> None:
    held = []
    for number in range(12):
        group = _formed(me, f"group {number}")
        over = me.under_way(dist.all_reduce(me.tensor(1.0), async_op=True))
        ends(over)
        me.tell(f"{me.rank} is done with {number}")
        me.told(f"{1 - me.rank} is done with {number}")  # or the other's wait could be one for the dead
        group.abort()
        dist.destroy_process_group()
        del group
        held.append(_threads_and_files())
    until = time.monotonic() + DEADLINE_S  # a thread that has been told to end is not scheduled at once
    while any(last > first for first, last in zip(held[2], _threads_and_files(), strict=True)):
        assert time.monotonic() < until, [*held, _threads_and_files()]
        time.sleep(0.01)


def _threads_and_files() -> list[int]:
    return [len(list(Path("/proc/self", of).iterdir())) for of in ("task", "fd")]


def both_send_first(me: Member) -> None:
    group = _formed(me)
    sent, got = me.tensor(me.rank, me.backend.large_bytes), me.tensor(-1.0, me.backend.large_bytes)
    dist.all_reduce(me.tensor(1.0))
    try:
        sending = dist.isend(sent, 1 - me.rank)
    except dist.DistBackendError:
        # NCCL 2.28 takes what the other side says of its sending for what that says of its receiving.
        assert me.backend.device == "cuda"
        return
    receiving = dist.irecv(got, 1 - me.rank)
    over = me.under_way(sending)
    stays(over)
    assert receiving is not None
    me.tell(f"{me.rank} has seen it")
    me.told(f"{1 - me.rank} has seen it")
    group.abort()
    ends(over)


def a_batch_sends_and_receives(me: Member) -> None:
    _formed(me)
    sent, got = me.tensor(me.rank, me.backend.large_bytes), me.tensor(-1.0, me.backend.large_bytes)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, 1 - me.rank), dist.P2POp(dist.irecv, got, 1 - me.rank)]
    )
    assert len(works) == 1  # for all of the batch
    ends(me.under_way(works[0]))
    assert me.values(got) == {1.0 - me.rank}


def _a_batch_of_torchs_own_way(me: Member) -> None:
    """Up to torch 2.13 it begins message by message on a group that is written in Python: both send first."""
    group = _formed(me)
    original = getattr(dist.batch_isend_irecv, "__wrapped__", None)  # set by functools.wraps
    assert (original is None) == COALESCES_ITSELF
    if original is None:
        return
    sent, got = me.tensor(me.rank, me.backend.large_bytes), me.tensor(-1.0, me.backend.large_bytes)
    works = original([dist.P2POp(dist.isend, sent, 1 - me.rank), dist.P2POp(dist.irecv, got, 1 - me.rank)])
    assert len(works) == 2
    over = me.under_way(works[1])
    stays(over)
    me.tell(f"{me.rank} has seen it")
    me.told(f"{1 - me.rank} has seen it")
    group.abort()
    ends(over)


def messages_need_a_pair_only(me: Member) -> None:
    me.begin()
    tensor = me.tensor(7.0 * me.rank)
    if me.rank == 0:
        ends(me.under_way(dist.irecv(tensor, 1)))
        assert me.values(tensor) == {7.0}
        me.tell("received")
    elif me.rank == 1:
        ends(me.under_way(dist.isend(tensor, 0)))
    else:
        me.told("received")


def a_batch_needs_all_at_first(me: Member) -> None:
    me.begin()
    tensor = me.tensor(7.0 * me.rank)
    if me.rank == 2:
        for rank in range(2):
            me.told(f"{rank} has waited")
        dist.barrier()
        return
    operation = dist.P2POp(dist.isend if me.rank else dist.irecv, tensor, 1 - me.rank)
    begun = in_thread(lambda: dist.batch_isend_irecv([operation]))
    stays(begun)
    me.tell(f"{me.rank} has waited")
    ends(begun)
    dist.barrier()
    assert me.values(tensor) == {7.0}


def tags_mean_nothing(me: Member) -> None:
    me.begin()
    if me.rank == 0:
        works = [dist.isend(me.tensor(float(tag)), 1, tag=tag) for tag in (1, 2)]
        for work in works:
            ends(me.under_way(work))
        me.told("received")
        return
    for expected, tag in ((1.0, 2), (2.0, 1)):
        tensor = me.tensor(0.0)
        ends(me.under_way(dist.irecv(tensor, 0, tag=tag)))
        assert me.values(tensor) == {expected}
    me.tell("received")


def nobody_receives_from_anyone(me: Member) -> None:
    _formed(me)
    with pytest.raises(RuntimeError, match="support"):
        dist.irecv(me.tensor(0.0))


def torch_trains_over_it(me: Member) -> None:
    me.begin()
    torch.manual_seed(me.rank)
    for train in (_with_ddp, _with_fsdp, _with_1f1b):
        parameters = train(me)
        assert all(parameter.isfinite().all() for parameter in parameters)
        if train is not _with_1f1b:  # whose members have different layers
            for parameter in parameters:
                others = [torch.empty_like(parameter) for _ in range(me.size)]
                dist.all_gather(others, parameter)
                assert all(torch.equal(parameter, other) for other in others)


def _with_ddp(me: Member) -> list[torch.Tensor]:
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6)).to(me.device)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(3, 4, device=me.device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def _with_fsdp(me: Member) -> list[torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)).to(me.device)
    fully_shard(model, mesh=init_device_mesh(me.backend.device, (me.size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(3, 4, device=me.device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [cast(DTensor, parameter).full_tensor().detach() for parameter in model.parameters()]


def _with_1f1b(me: Member) -> list[torch.Tensor]:
    layer = torch.nn.Linear(4, 4).to(me.device)
    stage = PipelineStage(layer, me.rank, me.size, me.device)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda got, wanted: (got - wanted).square().sum())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        given = [] if me.rank else [torch.randn(8, 4, device=me.device)]
        schedule.step(*given, target=torch.zeros(8, 4, device=me.device))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in layer.parameters()]


def the_watchdog_ends_the_process(me: Member) -> None:
    """The test looks at the exit code of the first member."""
    os.environ.pop(HANDLING, None)
    _overdue(me)


def the_watchdog_can_be_switched_off(me: Member) -> None:
    os.environ[HANDLING] = "0"
    _overdue(me)


def _overdue(me: Member) -> None:
    """An operation that takes three times as long as the group allows."""
    group: Any = _formed(me)
    group._get_backend(me.device)._set_default_timeout(timedelta(seconds=me.backend.timeout_s))
    if me.rank == 0:
        over = me.under_way(dist.all_reduce(me.tensor(1.0), async_op=True))
        threading.Event().wait(3 * me.backend.timeout_s + 0.5)
        assert not over()


def _die(me: Member, others: Sequence[int]) -> None:
    """Once the others have begun an operation: one that begins later may raise, where connections tell."""
    for rank in others:
        me.told(f"{rank} has begun")
    me.writes("pid", str(os.getpid()))
    me.die()


def _dead(me: Member) -> None:
    """Wait until a member has died: its process is a zombie, for the server waits for all."""
    me.tell(f"{me.rank} has begun")
    status = Path("/proc", me.reads("pid"), "status")
    ends(lambda: "State:\tZ" in status.read_text())
