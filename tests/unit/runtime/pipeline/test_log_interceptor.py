"""What a message is compared with, and when that says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swift_ft.errors import DivergenceError, LogMissingError
from swift_ft.logging import LogOptions, LogReader, LogStats, MessageKey, MessageLog, checksum_of
from swift_ft.runtime.pipeline.arrivals import Arrivals
from swift_ft.runtime.pipeline.log_interceptor import LogInterceptor
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.pipelining.interceptor import Message
from tests.support.log import LOG, RUN, key, message, receipt, write_segment


@pytest.mark.parametrize(("aborted", "error"), [(False, DivergenceError), (True, RuntimeError)])
def test_what_an_abort_has_left_does_not_diverge(aborted: bool, error: type[Exception]) -> None:
    """A stage that is ahead compares what it receives again: over NCCL that may be anything."""
    log = MessageLog(LogOptions(), LogStats(), in_doubt=lambda: aborted)
    interceptor = LogInterceptor(0, 1, (0, 1), 0, log)
    interceptor.expected = lambda _: 1234
    message = Message(key(), torch.ones(2), 1)
    with pytest.raises(error) as caught:
        interceptor.on_received(message)
    assert isinstance(caught.value, DivergenceError) != aborted


SENT, RECEIVED = key(), key(source_stage=1, destination_stage=0)
VALUE = torch.ones(2)


def audit(folder: Path, *known: MessageKey, patience_s: float = 0.0) -> LogInterceptor:
    """Of worker 0, next to which is worker 1: the logs say of some messages what has arrived."""
    store = Store(folder)
    write_segment(store, [message(SENT, VALUE), message(RECEIVED, VALUE)], sequence=0)
    log = LogReader(store, [LOG], run_id=RUN)
    log.refresh()
    if known:  # only now
        write_segment(store, [receipt(name, checksum_of(VALUE)) for name in known], sequence=1)
    arrivals = Arrivals(log, patience_s)
    nothing = MessageLog(LogOptions(), LogStats())
    nothing.muted = True
    made = LogInterceptor(0, 1, (0, 1, 1), 0, nothing, source=log, expected=arrivals.of_message)
    made.retains = False
    return made


@pytest.mark.parametrize("other", [SENT, RECEIVED])
def test_an_audit_needs_to_know_what_has_arrived(other: MessageKey, tmp_path: Path) -> None:
    """Else what the link has changed would be taken for the machine's, or would come out as right."""
    replay = audit(tmp_path, other)
    compare, unknown = (replay.on_received, RECEIVED) if other == SENT else (replay.on_send, SENT)
    with pytest.raises(LogMissingError, match="so a difference could be the link's"):
        compare(Message(unknown, VALUE, 1))


def test_an_audit_waits_for_what_is_about_to_be_in_the_logs(tmp_path: Path) -> None:
    replay = audit(tmp_path, SENT, RECEIVED, patience_s=30.0)
    assert not replay.on_send(Message(SENT, VALUE, 1))
    replay.on_received(Message(RECEIVED, VALUE, 1))
    with pytest.raises(DivergenceError):
        replay.on_received(Message(RECEIVED, VALUE + 1, 1))


def test_messages_inside_a_recovery_group_are_in_no_log(tmp_path: Path) -> None:
    replay = audit(tmp_path)
    replay.recovery_groups = (0, 0, 1)
    replay.on_received(Message(RECEIVED, VALUE, 1))
