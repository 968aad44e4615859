"""Messages inside a machine are in no log, and can be sent again for one iteration."""

from __future__ import annotations

import torch

from swift_ft.logging import Direction, MessageKey
from swift_ft.runtime.pipeline.log_interceptor import RetainedSends


def key(iteration: int, microbatch: int = 0) -> MessageKey:
    return MessageKey(iteration, microbatch, Direction.FORWARD, 0, 1, 0)


def test_the_iteration_that_runs_and_the_one_before_it_are_kept() -> None:
    sends = RetainedSends()
    for iteration in range(3):
        sends.begin(iteration)
        sends.keep(key(iteration), torch.full((2,), float(iteration)))
    assert sends.get(key(0)) is None
    for iteration in (1, 2):
        kept = sends.get(key(iteration))
        assert kept is not None
        assert float(kept[0]) == iteration
        assert sends.has_all_of(iteration)


def test_what_was_changed_since_does_not_count() -> None:
    sends, tensor = RetainedSends(), torch.ones(2)
    sends.keep(key(4), tensor)
    sends.keep(key(5), torch.ones(2))
    tensor.add_(1)
    assert not sends.has_all_of(4)
    assert sends.has_all_of(5)


def test_no_graph_is_kept() -> None:
    sends = RetainedSends()
    sends.keep(key(0), torch.ones(2, requires_grad=True) * 2)
    kept = sends.get(key(0))
    assert kept is not None
    assert kept.grad_fn is None


def test_messages_on_a_device_are_not_retained() -> None:
    sends = RetainedSends()
    sends.keep(key(3), torch.empty(2, device="meta"))
    assert not sends.has_all_of(3)
    sends.begin(5)
    assert sends.has_all_of(3)  # too old to be asked for
