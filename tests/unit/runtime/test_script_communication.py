"""What a script communicates: what is logged and served, and what lets workers replay together."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash

from swift_ft.errors import DivergenceError, LogMissingError, RecoveryError
from swift_ft.logging import (
    Direction,
    LogOptions,
    LogReader,
    LogStats,
    LogWriter,
    MessageKey,
    MessageLog,
    SegmentIdentity,
    checksum_of,
)
from swift_ft.runtime.pipeline.arrivals import Arrivals
from swift_ft.runtime.pipeline.script_communication import (
    LIMIT_BYTES,
    Absence,
    GroupUse,
    ScriptCommunication,
)
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.script_operations import Operation

WORKERS = range(4)


def broadcast_options(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


class Logs:
    """The logs of four workers, on two machines, and what their scripts do."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(str(folder))

    def worker(self, rank: int, generation: int = 1) -> ScriptCommunication:
        """One that logs."""
        log = MessageLog(LogOptions(), LogStats())
        identity = SegmentIdentity("run", rank, generation)
        log.writer = LogWriter(self.store, f"log/{rank}", identity, LogOptions())
        return ScriptCommunication(rank, lambda other: other // 2, log)

    def reader(self, rank: int) -> LogReader:
        reader = LogReader(self.store, [f"log/{rank}"], run_id="run")
        reader.refresh()
        return reader


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def close(worker: ScriptCommunication) -> None:
    """Others can read its log from now on."""
    assert worker.log.writer is not None
    worker.log.writer.close(30)


def operation(
    name: str, *tensors: torch.Tensor, group: str = "0", peer: int | None = None, tag: int = 0
) -> Operation:
    return Operation(name, group, tuple(WORKERS), tensors, peer, tag=tag)


def done(worker: ScriptCommunication, what: Operation) -> None:
    """It took place, and gave what its tensors hold."""
    over = worker.begin(what)
    assert over is not None
    over()


def absent(logs: Logs, *ranks: int, until: int = 9, near: tuple[int, ...] = ()) -> Absence:
    return Absence(ranks, until, logs.reader, near)


def test_results_are_served_by_whoever_has_them(logs: Logs) -> None:
    original, again = logs.worker(2), logs.worker(0)
    original.begin_iteration(3)
    for value in (1.0, 2.0):
        done(original, operation("allreduce", torch.tensor([value])))
    done(original, operation("allgather", torch.tensor([5.0]), torch.tensor([6, 7]), group="1"))
    done(original, operation("barrier"))
    close(original)
    again.without(absent(logs, 2, 3, near=(2,)))
    again.begin_iteration(3)
    got = [torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(2, dtype=torch.int64)]
    assert again.begin(operation("allreduce", got[0])) is None
    assert again.begin(operation("allgather", got[2], got[3], group="1")) is None
    assert again.begin(operation("allreduce", got[1])) is None
    assert again.begin(operation("barrier")) is None
    assert [tensor.tolist() for tensor in got] == [[1.0], [2.0], [5.0], [6, 7]]
    with pytest.raises(LogMissingError, match="iteration 3, operation 3 of the script"):
        again.begin(operation("allreduce", torch.zeros(1)))


def test_what_was_served_is_logged_again(logs: Logs) -> None:
    """The next machine may be lost before the next checkpoint."""
    first, second, third = logs.worker(2), logs.worker(0), logs.worker(3)
    first.begin_iteration(0)
    done(first, operation("broadcast", torch.tensor([4.0])))
    close(first)
    second.without(absent(logs, 2))
    second.begin_iteration(0)
    assert second.begin(operation("broadcast", torch.zeros(1))) is None
    close(second)
    third.without(absent(logs, 0))
    third.begin_iteration(0)
    got = torch.zeros(1)
    assert third.begin(operation("broadcast", got)) is None
    assert got.tolist() == [4.0]


def test_a_replay_that_broadcasts_something_else_has_diverged(logs: Logs) -> None:
    """The others got the original's, and the sender of a broadcast keeps its own."""
    original, again = logs.worker(2), logs.worker(0)
    original.begin_iteration(0)
    for value in (4.0, 5.0):
        done(original, operation("broadcast", torch.tensor([value])))
    close(original)
    again.without(absent(logs, 2))
    again.begin_iteration(0)
    assert again.begin(replace(operation("broadcast", torch.tensor([4.0])), source=0)) is None
    with pytest.raises(
        DivergenceError, match=r"test_script_communication.py:\d+ .*broadcasts other bytes"
    ) as caught:
        again.begin(replace(operation("broadcast", torch.tensor([5.5])), source=0))
    assert caught.value.fields["computed"] == checksum_of(torch.tensor([5.5]))  # two replays may agree


def audit(logs: Logs, holder: int, rank: int) -> Absence:
    """As :func:`absent`, and what the worker itself was given counts, too."""
    log = LogReader(logs.store, [f"log/{rank}"], run_id="run")
    log.refresh()
    return replace(absent(logs, holder), arrivals=Arrivals(log, patience_s=0.0))


@pytest.mark.parametrize("source", [None, 2, 3])
def test_a_result_that_arrived_as_something_else_is_told_from_a_wrong_computation(
    source: int | None, logs: Logs
) -> None:
    """An audit of the worker that got it would compute with another one, and blame its machine."""
    others, original, again = logs.worker(2), logs.worker(0), logs.worker(0)
    for worker, value in ((others, 4.0), (original, 4.5)):
        worker.begin_iteration(0)
        done(worker, replace(operation("broadcast", torch.tensor([1.0])), source=source))
        done(worker, replace(operation("broadcast", torch.tensor([value])), source=source))
        close(worker)
    again.without(audit(logs, 2, 0))
    again.begin_iteration(0)
    assert again.begin(replace(operation("broadcast", torch.zeros(1)), source=source)) is None
    with pytest.raises(DivergenceError, match="worker 2 has other bytes of it") as caught:
        again.begin(replace(operation("broadcast", torch.zeros(1)), source=source))
    fields = caught.value.fields
    assert (fields["sender"], fields["computed"]) == (source or 2, checksum_of(torch.tensor([4.0])))
    again.without(absent(logs, 2))  # a recovery goes on with what the others have
    again.begin_iteration(0)
    for _ in range(2):
        assert again.begin(replace(operation("broadcast", torch.zeros(1)), source=source)) is None


def test_a_message_of_the_script_that_arrived_as_something_else(logs: Logs) -> None:
    sender, original, again = logs.worker(2), logs.worker(0), logs.worker(0)
    for worker, name, peer, values in ((sender, "send", 0, (1.0, 2.0)), (original, "recv", 2, (1.0, 2.5))):
        worker.begin_iteration(0)
        for value in values:
            done(worker, operation(name, torch.tensor([value]), peer=peer))
        close(worker)
    again.without(audit(logs, 2, 0))
    again.begin_iteration(0)
    assert again.begin(operation("recv", torch.zeros(1), peer=2)) is None
    with pytest.raises(DivergenceError) as caught:
        again.begin(operation("recv", torch.zeros(1), peer=2))
    assert caught.value.fields["sender"] == 2


@pytest.mark.parametrize(("name", "peer"), [("allreduce", None), ("recv", 2)])
def test_a_result_is_not_audited_if_nothing_says_what_has_arrived(
    name: str, peer: int | None, logs: Logs
) -> None:
    other, again = logs.worker(2), logs.worker(0)
    other.begin_iteration(0)
    done(other, operation("send" if peer else name, torch.ones(1), peer=0 if peer else None))
    close(other)
    again.without(audit(logs, 2, 0))
    again.begin_iteration(0)
    with pytest.raises(LogMissingError, match="so a difference could be the link's"):
        again.begin(operation(name, torch.zeros(1), peer=peer))


@pytest.mark.parametrize(
    ("args", "source"),
    [
        pytest.param(([torch.zeros(1)], broadcast_options(2)), 12, id="options"),
        pytest.param((torch.zeros(1), 1), 11, id="a rank"),
        pytest.param((torch.zeros(1),), 10, id="neither"),
    ],
)
def test_the_source_of_a_broadcast_is_a_global_rank(args: tuple[Any, ...], source: int) -> None:
    assert Operation.of("broadcast", "g", (10, 11, 12), args).source == source
    assert Operation.of("allreduce", "g", (10, 11, 12), args).source is None


def test_the_tag_of_a_message_is_that_of_its_group() -> None:
    """Of its arguments, some backends ignore it."""
    message = ([torch.zeros(1)], 1, 7)
    assert Operation.of("send", "g", (10, 11, 12), message).tag == 0
    assert Operation.of("send", "g", (10, 11, 12), message, 7).tag == 7


def test_a_message_comes_from_its_sender_and_is_not_sent_again(logs: Logs) -> None:
    sender, receiver = logs.worker(2), logs.worker(0)
    sender.begin_iteration(0)
    done(sender, operation("send", torch.tensor([1.0]), peer=1))  # to another one: counted apart
    done(sender, operation("send", torch.tensor([2.0]), peer=0))
    close(sender)
    receiver.without(absent(logs, 2, 3))
    receiver.begin_iteration(0)
    got = torch.zeros(1)
    assert receiver.begin(operation("recv", got, peer=2)) is None
    assert got.tolist() == [2.0]
    assert receiver.begin(operation("send", torch.zeros(1), peer=3)) is None
    assert receiver.begin(operation("send", torch.zeros(1), peer=1)) is not None  # it replays, too


MESSAGES = [("0", 1, 1.0), ("0", 2, 2.0), ("0", 1, 3.0), ("1", 1, 4.0), ("0", 0, 5.0)]
"""Group, tag and value of each, in the order in which they are sent."""
TAKEN = [MESSAGES[number] for number in (4, 1, 0, 3, 2)]
"""As another worker takes them: those of one group with one tag in their order."""


@pytest.mark.parametrize("audited", [False, True])
def test_a_message_is_known_by_its_tag(audited: bool, logs: Logs) -> None:
    """With gloo, a receive is given the next message that has its tag, whichever was sent first."""
    sender, receiver, again = logs.worker(2), logs.worker(0), logs.worker(0)
    for worker, name, peer, messages in ((sender, "send", 0, MESSAGES), (receiver, "recv", 2, TAKEN)):
        worker.begin_iteration(0)
        for group, tag, value in messages:
            done(worker, operation(name, torch.tensor([value]), group=group, peer=peer, tag=tag))
        close(worker)
    again.without(audit(logs, 2, 0) if audited else absent(logs, 2))
    again.begin_iteration(0)
    for group, tag, value in TAKEN:
        got = torch.zeros(1)
        assert again.begin(operation("recv", got, group=group, peer=2, tag=tag)) is None
        assert got.item() == value


def test_logs_from_before_tags_counted_are_still_read(logs: Logs) -> None:
    """Most messages have none, and a run may go on with another release."""
    sender = logs.worker(2)
    sender.begin_iteration(3)
    keys = [sender._next_key(operation("send", torch.zeros(1), peer=0)) for _ in range(2)]
    place = xxhash.xxh3_64_intdigest(b"0 2 0") >> 1
    assert keys == [MessageKey(3, number, Direction.SCRIPT, place, 2, 0) for number in range(2)]


def times(logs: Logs, rank: int, generation: int, values: dict[int, float], until: int) -> None:
    """What worker 2 sends worker 0 in its iterations: how long they took. It differs each time."""
    worker = logs.worker(rank, generation)
    for iteration in range(min(values), until):
        worker.begin_iteration(iteration)
        if iteration in values:
            value = torch.tensor([values[iteration]])
            done(worker, operation("recv" if rank == 0 else "send", value, peer=2 - rank))
        done(worker, operation("barrier"))
        done(worker, operation("allreduce", torch.zeros(1)))
    close(worker)


def taken(again: ScriptCommunication, iteration: int = 0) -> float:
    got = torch.zeros(1)
    again.begin_iteration(iteration)
    assert again.begin(operation("recv", got, peer=2)) is None
    return got.item()


def test_an_audit_is_given_what_the_original_got(logs: Logs) -> None:
    """The sender was lost, and has sent nothing in its replay. It has logged another value."""
    times(logs, 2, 1, {0: 1.0, 1: 2.0}, until=2)
    times(logs, 0, 1, {0: 1.0, 1: 2.25}, until=3)
    times(logs, 2, 2, {0: 1.5, 1: 2.5}, until=2)
    again = logs.worker(0, 3)
    again.without(audit(logs, 2, 0))
    assert taken(again) == 1.0
    with pytest.raises(DivergenceError, match="worker 2 has other bytes of it"):  # in none of its lives
        taken(again, 1)


def test_a_replay_is_given_what_the_original_got(logs: Logs) -> None:
    times(logs, 2, 1, {0: 1.0, 1: 2.0}, until=2)
    times(logs, 0, 1, {0: 1.0, 1: 2.25}, until=3)
    times(logs, 2, 2, {0: 1.5, 1: 2.5}, until=2)
    again = logs.worker(0, 3)
    again.without(absent(logs, 2))
    assert taken(again) == 1.0
    assert taken(again, 1) == 2.5, "without a copy of what it got, the newest counts"


def test_a_replay_is_not_given_what_its_original_has_not_computed_with(logs: Logs) -> None:
    """Both were interrupted, and repeated the iteration. The last segment of the receiver is lost."""
    times(logs, 2, 1, {0: 1.0}, until=1)
    times(logs, 0, 1, {0: 1.0}, until=1)
    times(logs, 2, 2, {0: 1.5}, until=2)
    again = logs.worker(0, 3)
    again.without(absent(logs, 2))
    assert taken(again) == 1.5


def test_a_replay_does_without_a_log_of_its_original(logs: Logs) -> None:
    """It was on the machine that was lost, or is damaged. Where there is no choice it is not even opened."""
    opened: list[int] = []

    def read(rank: int) -> LogReader:
        opened.append(rank)
        if rank == 0:
            raise LogMissingError("it is gone")
        return logs.reader(rank)

    times(logs, 2, 1, {0: 1.0, 1: 2.0}, until=2)
    times(logs, 2, 2, {1: 2.5}, until=2)
    again = logs.worker(0, 3)
    again.without(Absence([2], 9, read))
    assert taken(again) == 1.0
    assert opened == [2]
    assert taken(again, 1) == 2.5
    assert opened == [2, 0]


def test_what_changes_after_the_operation_is_logged_as_it_was(logs: Logs) -> None:
    original, again = logs.worker(2), logs.worker(0)
    original.begin_iteration(0)
    loss = torch.tensor([8.0])
    done(original, operation("allreduce", loss))
    loss /= 4
    close(original)
    again.without(absent(logs, 2))
    again.begin_iteration(0)
    got = torch.zeros(1)
    again.begin(operation("allreduce", got))
    assert got.tolist() == [8.0]


def test_operations_are_numbered_where_they_begin(logs: Logs) -> None:
    """Two are under way at once, and end the other way round."""
    original, again = logs.worker(2), logs.worker(0)
    original.begin_iteration(0)
    ends = [original.begin(operation("allreduce", torch.tensor([value]))) for value in (1.0, 2.0)]
    for end in reversed(ends):
        assert end is not None
        end()
    close(original)
    again.without(absent(logs, 2))
    again.begin_iteration(0)
    first, second = torch.zeros(1), torch.zeros(1)
    again.begin(operation("allreduce", first))
    again.begin(operation("allreduce", second))
    assert (first.item(), second.item()) == (1.0, 2.0)


def test_everybody_takes_part_again_afterwards(logs: Logs) -> None:
    worker = logs.worker(0)
    worker.without(absent(logs, 2, until=4))
    worker.begin_iteration(4)
    assert worker.begin(operation("allreduce", torch.zeros(1))) is not None
    worker.without(None)
    worker.begin_iteration(3)
    assert worker.begin(operation("allreduce", torch.zeros(1))) is not None


def test_before_the_first_iteration_nothing_is_logged(logs: Logs) -> None:
    worker = logs.worker(0)
    done(worker, operation("reduce_scatter", torch.zeros(1)))
    assert not worker.logged
    assert not worker.together


def test_workers_that_are_lost_together_take_part_again(logs: Logs) -> None:
    """Those of one machine, for example: nothing is logged, and they replay together."""
    worker = logs.worker(0)
    worker.without(absent(logs, 2, 3))
    worker.begin_iteration(0)
    done(worker, Operation("reduce_scatter", "1", (0, 1), (torch.zeros(LIMIT_BYTES),)))
    assert not worker.logged
    assert worker.together == {1}
    assert not worker.why


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda: operation("reduce_scatter", torch.zeros(1)), "gives each of them something else"),
        (lambda: operation("gather", torch.zeros(1)), "gives each of them something else"),
        (lambda: operation("recv_anysource", torch.zeros(1)), "takes from the first sender"),
        (lambda: operation("allreduce", torch.zeros(LIMIT_BYTES)), "has 4.19 MB .* and 1.05 MB may be"),
    ],
)
def test_members_of_what_no_log_has_replay_together(
    what: Callable[[], Operation], words: str, logs: Logs
) -> None:
    """All others know it before it happens, with the line of the script."""
    announced: list[GroupUse] = []
    worker = logs.worker(0)

    def announce(use: GroupUse) -> None:
        announced.append(use)
        assert worker.together == {1, 2, 3}, "the worker's record, which is written now, would lack them"

    worker.on_together = announce
    worker.begin_iteration(0)
    for _ in range(2):
        assert worker.begin(what()) is not None
    (use,) = announced
    assert use.members == (0, 1, 2, 3)
    assert re.search(f"test_script_communication.py:.* workers 0, 1, 2, 3, which {words}", use.why), use.why
    assert worker.together == {1, 2, 3}
    assert worker.why == use.why
    assert not worker.logged


def test_the_limit_is_that_of_a_group_in_an_iteration(logs: Logs) -> None:
    worker = logs.worker(0)
    worker.limit_bytes = 100
    part = torch.zeros(12)  # 48 bytes
    for iteration in range(2):
        worker.begin_iteration(iteration)
        for group in ("0", "1"):
            done(worker, operation("allreduce", part, group=group))
            done(worker, operation("broadcast", part, group=group))
    assert not worker.together
    done(worker, operation("allreduce", part, group="1"))
    assert worker.together == {1, 2, 3}
    ways = {(use.members, use.together, use.most) for use in worker.uses.values()}
    assert ways == {((0, 1, 2, 3), False, 96), ((0, 1, 2, 3), True, 144)}


def test_of_large_messages_only_both_sides_replay_together(logs: Logs) -> None:
    sender, receiver = logs.worker(2), logs.worker(0)
    for worker in (sender, receiver):
        worker.begin_iteration(0)
    done(sender, operation("send", torch.zeros(LIMIT_BYTES), peer=0))
    done(receiver, operation("recv", torch.zeros(LIMIT_BYTES), peer=2))
    assert (sender.together, receiver.together) == ({0}, {2})


def test_what_no_log_has_is_not_repeated_without_the_others(logs: Logs) -> None:
    """A plan lets them replay together. If it did not, the worker would wait for ever."""
    worker = logs.worker(0)
    worker.without(absent(logs, 2, 3))
    worker.begin_iteration(5)
    with pytest.raises(
        RecoveryError, match="worker 0 calls alltoall in iteration 5 again, which is in no log"
    ):
        worker.begin(operation("alltoall", torch.zeros(1)))
    worker.without(absent(logs, 3))
    assert worker.begin(Operation("alltoall", "2", (0, 2), (torch.zeros(1),))) is not None


def test_nobody_waits_for_a_lost_worker_that_replays_elsewhere(logs: Logs) -> None:
    """The only two members were lost, and replay apart: no log has what they communicated."""
    worker = logs.worker(0)
    worker.without(replace(absent(logs, 1, 2), present={0}))
    worker.begin_iteration(5)
    both = Operation("allreduce", "ends", (0, 3), (torch.zeros(1),))
    with pytest.raises(
        RecoveryError, match="worker 0 calls allreduce in iteration 5 again, which is in no log"
    ):
        worker.begin(both)
    worker.without(replace(absent(logs, 1, 2), present={0, 3}))
    assert worker.begin(both) is not None
