"""What stays inside a machine is in no log, and can be sent again for one iteration."""

from __future__ import annotations

import torch

from swift_ft.logging import Direction, MessageKey
from swift_ft.recovery.replay import SentInside


def key(iteration: int, microbatch: int = 0) -> MessageKey:
    return MessageKey(iteration, microbatch, Direction.FORWARD, 0, 1, 0)


def test_the_iteration_that_runs_and_the_one_before_it_are_kept() -> None:
    inside = SentInside()
    for iteration in range(3):
        inside.begin(iteration)
        inside.keep(key(iteration), torch.full((2,), float(iteration)))
    assert inside.get(key(0)) is None
    for iteration in (1, 2):
        kept = inside.get(key(iteration))
        assert kept is not None
        assert float(kept[0]) == iteration
        assert inside.has_all_of(iteration)


def test_what_was_changed_since_does_not_count() -> None:
    inside, tensor = SentInside(), torch.ones(2)
    inside.keep(key(4), tensor)
    inside.keep(key(5), torch.ones(2))
    tensor.add_(1)
    assert not inside.has_all_of(4)
    assert inside.has_all_of(5)


def test_no_graph_is_kept() -> None:
    inside = SentInside()
    inside.keep(key(0), torch.ones(2, requires_grad=True) * 2)
    kept = inside.get(key(0))
    assert kept is not None
    assert kept.grad_fn is None


def test_a_devices_messages_are_not_kept() -> None:
    inside = SentInside()
    inside.keep(key(3), torch.empty(2, device="meta"))
    assert not inside.has_all_of(3)
    inside.begin(5)
    assert inside.has_all_of(3)  # nobody asks for it any more
