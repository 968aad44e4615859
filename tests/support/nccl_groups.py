"""What groups of our own do over a backend like NCCL: a function for each test, run by all members."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from swift_ft.errors import RecoveryError
from swift_ft.testing.nccl_like import NcclLikeGroup
from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.directed_group import DirectedGroup
from swift_ft.torch_adapters.gathering import gather
from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.lasting_work import LastingWork
from swift_ft.torch_adapters.present_members import PresentMembers
from swift_ft.torch_adapters.script_groups import script_groups
from swift_ft.torch_adapters.script_operations import Operation
from tests.support.nccl_members import Member, ends


class Noted:
    """An interceptor that notes what begins and what ends.

    Attributes:
        begun: names of operations.
        ended: of those that are over.
        fails: an operation by which the way back turns out to be impossible.
        served: no operation begins: its tensors count as filled.
    """

    def __init__(self, *, fails: str = "", served: bool = False) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.fails = fails
        self.served = served

    def begin_unseen(self, name: str, workers: int) -> None:
        """Each one is noted as it begins."""

    def begin(self, operation: Operation) -> Callable[[], None] | None:
        """See the protocol."""
        if operation.name == self.fails:
            raise RecoveryError("in no log")
        self.begun.append(operation.name)
        return None if self.served else lambda: self.ended.append(operation.name)


def _begin(me: Member, noted: Noted) -> LastingGroup:
    """The default group of a script that trains under a session."""
    script_groups.install()
    LastingWork.waits = AbortableWaits()
    me.begin()
    dist.barrier()
    LastingWork.waits.silent = True
    LastingGroup.interceptor = noted
    return script_groups.default


def _begin_again(me: Member, group: LastingGroup) -> None:
    """As after a loss."""
    assert LastingWork.waits is not None
    script_groups.end()
    LastingWork.waits.renew()
    script_groups.renew(group, dist.PrefixStore("second generation", me.store))


def _exchange(me: Member) -> tuple[list[dist.Work], torch.Tensor]:
    """A batch that sends to the other member, and receives from it."""
    peer, taken = 1 - me.rank, me.tensor(-1)
    operations = [
        dist.P2POp(dist.isend, me.tensor(me.rank), peer),
        dist.P2POp(dist.irecv, taken, peer),
    ]
    return dist.batch_isend_irecv(operations), taken


def _exchanges(me: Member, noted: Noted) -> None:
    """Checks that a batch, and a collective after it, do what they should, and that it is noted."""
    noted.begun.clear()
    works, taken = _exchange(me)
    assert noted.begun == ["send", "recv"]
    for work in works:
        work.wait()
    assert me.values(taken) == {1.0 - me.rank}
    assert noted.ended == ["send", "recv"]
    reduced = me.tensor(1)
    dist.all_reduce(reduced)
    assert me.values(reduced) == {2.0}
    assert noted.ended == ["send", "recv", "allreduce"]


def batch_is_aborted(me: Member) -> None:
    """The other member does not take part in it, and counts as lost."""
    noted = Noted()
    group = _begin(me, noted)
    if me.rank == 0:
        works, _ = _exchange(me)
        assert LastingWork.waits is not None
        threading.Thread(target=_abort, args=(LastingWork.waits, group)).start()
        with pytest.raises(RuntimeError, match="aborted"):
            works[0].wait()
        assert (noted.begun, noted.ended) == (["send", "recv"], [])  # no log may have what it left
    _begin_again(me, group)
    _exchanges(me, noted)


def _abort(waits: AbortableWaits, group: LastingGroup) -> None:
    waits.abort()
    group.abort()


def batch_raises(me: Member) -> None:
    """In its second operation. torch then neither ends the batch nor forgets it."""
    noted = Noted(fails="recv")
    group = _begin(me, noted)
    with pytest.raises(RecoveryError):
        _exchange(me)
    noted.fails = ""
    _begin_again(me, group)
    reduced = me.tensor(1)
    dist.all_reduce(reduced)
    assert me.values(reduced) == {2.0}
    assert noted.ended == ["allreduce"]
    noted.ended.clear()
    _exchanges(me, noted)


def batch_is_served(me: Member) -> None:
    """Whether there is a group beneath or not: a script waits for what a batch gives."""
    noted = Noted(served=True)
    group = _begin(me, noted)
    for _ in ("a group beneath", "none"):
        works, _ = _exchange(me)
        assert works
        works[-1].wait()
        script_groups.end()
    assert noted.begun == ["send", "recv"] * 2
    noted.served = False
    with pytest.raises(RuntimeError, match="ended with its generation"):
        _exchange(me)
    _begin_again(me, group)
    _exchanges(me, noted)


def _form(me: Member, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    place = list(ranks).index(me.rank)
    return NcclLikeGroup(dist.PrefixStore(name, me.store), place, len(ranks), timedelta(minutes=10))


def _directed(me: Member) -> DirectedGroup:
    me.begin()
    native = dist.group.WORLD
    assert native is not None
    return DirectedGroup(
        native,
        range(me.size),
        partial(_form, me),
        lambda name: gather(me.store, name, 2, timedelta(minutes=1)),
    )


def all_receive_first(me: Member) -> None:
    """In a ring. The first message of each pair would hold all of them."""
    group = _directed(me)
    before, after = (me.rank - 1) % me.size, (me.rank + 1) % me.size
    group.meet({before, after})
    got = me.tensor(-1.0)
    receiving = group.recv([got], before)
    sending = group.send([me.tensor(me.rank)], after)
    for work in (receiving, sending):
        ends(me.under_way(work))
    assert me.values(got) == {float(before)}


def no_pair_forms_once_it_is_left(me: Member) -> None:
    """A thread that an abort has let go on would form it among those of the next generation."""
    group = _directed(me)
    group.shutdown()
    with pytest.raises(RuntimeError, match="ended with its generation"):
        group.meet({1 - me.rank})


def batch_without_an_absent_member(me: Member) -> None:
    """As in a replay of two of three: the third one takes part in nothing, also if it could."""
    noted = Noted()
    group = _begin(me, noted)
    _begin_again(me, group)
    present = [0, 2]
    if me.rank in present:
        group.present = PresentMembers(_form(me, "present", present), present)
        peer, taken = 2 - me.rank, me.tensor(-1)
        operations = [
            dist.P2POp(dist.isend, me.tensor(me.rank), peer),
            dist.P2POp(dist.irecv, taken, peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert me.values(taken) == {float(peer)}
        assert noted.ended == ["send", "recv"]
        assert group.native.formed == []  # type: ignore[attr-defined]  # of the backend like NCCL
        me.tell(f"{me.rank} is done")
    for rank in present:
        me.told(f"{rank} is done")


def messages_by_direction(me: Member) -> None:
    """Both send first."""
    group = _directed(me)
    peer = 1 - me.rank
    sent, got = me.tensor(me.rank, me.backend.large_bytes), me.tensor(-1.0, me.backend.large_bytes)
    sending, receiving = group.send([sent], peer), group.recv([got], peer)
    for work in (sending, receiving):
        ends(me.under_way(work))
    assert me.values(got) == {float(peer)}
