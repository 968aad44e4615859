"""A replay without the job: where an audit's difference would be no fault."""

from __future__ import annotations

import pytest

from swift_ft.errors import UsageError
from swift_ft.host.processor import CHOOSES_BY_TIME
from swift_ft.runtime.offline_replay import check_auditable


def test_alike_processors_are_audited() -> None:
    check_auditable("x86, 1 threads", "x86, 1 threads", exact=True)


@pytest.mark.parametrize(
    ("here", "there", "exact", "why"),
    [
        ("x86, 2 threads", "x86, 1 threads", True, "it computes on x86, 1 threads, and the spare on x86, 2"),
        ("x86, 1 threads", "", True, "an unknown processor"),
        (f"a GPU, {CHOOSES_BY_TIME}", f"a GPU, {CHOOSES_BY_TIME}", True, "another one each time"),
        ("x86, 1 threads", "x86, 1 threads", False, "round otherwise"),
    ],
)
def test_what_rounds_otherwise_is_not_audited(here: str, there: str, exact: bool, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_auditable(here, there, exact=exact)
