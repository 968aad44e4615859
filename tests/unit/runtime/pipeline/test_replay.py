"""Why a shared replay has failed: by a connection, by a log, or because this worker cannot help."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft.errors import CannotHelpError, DivergenceError
from swift_ft.recovery import events as ev
from swift_ft.runtime.pipeline.replay import Replays
from swift_ft.torch_adapters.abortable_waits import AbortableWaits


class Helper:
    """A worker whose part in a shared replay raises something, over NCCL.

    Attributes:
        said: what it does then: the cause of a broken connection, or an event.
    """

    def __init__(self) -> None:
        self.said: list[Any] = []
        groups: Any = SimpleNamespace(
            enter_replay_group=lambda *_, **__: True,
            on_connection_broken=self.said.append,
            leave=lambda: None,
        )
        participant: Any = SimpleNamespace(append=self.said.append, context=SimpleNamespace(rank=0))
        nothing: Any = None
        self.replays = Replays(
            nothing, nothing, nothing, participant, groups, nothing, own=lambda: (), aside=nullcontext
        )

    def take_part(self, error: Exception) -> bool:
        def act() -> None:
            raise error

        state: Any = SimpleNamespace(generation=3)
        shared: Any = SimpleNamespace(members=(0, 1))
        return self.replays._take_part(state, shared, act)


@pytest.mark.parametrize(
    "error",
    [ValueError("no such shape"), CannotHelpError("a module"), DivergenceError("other bits")],
    ids=repr,
)
def test_what_an_abort_has_left_says_nothing_of_the_replay(error: Exception, waits: AbortableWaits) -> None:
    waits.abort()
    helper = Helper()
    assert not helper.take_part(error)
    assert [type(one) for one in helper.said] == [str]


def test_without_an_abort_it_says_what_failed(waits: AbortableWaits) -> None:
    helper = Helper()
    assert not helper.take_part(ValueError("no such shape"))
    assert [type(one) for one in helper.said] == [ev.HelpDeclined]
    with pytest.raises(DivergenceError):
        helper.take_part(DivergenceError("other bits"))
