"""What a message is compared with, and when that says nothing."""

from __future__ import annotations

import pytest
import torch

from swift_ft.errors import DivergenceError
from swift_ft.logging import LogOptions, LogStats, MessageLog
from swift_ft.runtime.pipeline.log_interceptor import LogInterceptor
from swift_ft.torch_adapters.pipelining.interceptor import Message
from tests.support.log import key


@pytest.mark.parametrize(("aborted", "error"), [(False, DivergenceError), (True, RuntimeError)])
def test_what_an_abort_has_left_does_not_diverge(aborted: bool, error: type[Exception]) -> None:
    """A stage that is ahead compares what it receives again: over NCCL that may be anything."""
    log = MessageLog(LogOptions(), LogStats(), in_doubt=lambda: aborted)
    interceptor = LogInterceptor(0, 1, (0, 0), 0, log)
    interceptor.expected = lambda _: 1234
    message = Message(key(), torch.ones(2), 1)
    with pytest.raises(error) as caught:
        interceptor.on_received(message)
    assert isinstance(caught.value, DivergenceError) != aborted
