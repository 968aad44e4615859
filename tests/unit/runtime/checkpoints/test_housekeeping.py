"""What a commit makes deletable: logs before the newest checkpoint, or before the oldest one that is kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest

from swift_ft.recovery.job_state import Phase, State
from swift_ft.runtime.checkpoints.housekeeping import Housekeeping, KeepLogs


class Log:
    """Notes before which iteration and up to which generation it is dropped."""

    def __init__(self) -> None:
        self.dropped: list[tuple[int, int]] = []

    def drop_before(self, iteration: int, generation: int) -> None:
        self.dropped.append((iteration, generation))


@pytest.mark.parametrize(("keep", "oldest"), [(KeepLogs.NEWEST, 30), (KeepLogs.ALL, 10)])
def test_which_logs_stay(keep: KeepLogs, oldest: int) -> None:
    state = State(phase=Phase.LIVE, generation=4)
    state = replace(state, checkpoints=replace(state.checkpoints, committed=30, earlier=(10, 20)))
    log = Log()
    with ThreadPoolExecutor(1) as background:
        housekeeping = Housekeeping(1, "run", *cast(Any, (None, log)), keep_logs=keep, background=background)
        housekeeping.on_change(state)
    assert log.dropped == [(oldest, 4)]
