"""When a change pays, and that waiting for it never loses more than twice what knowing would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery.layout.change import Change


def test_a_change_pays_after_its_cost() -> None:
    change = Change(before_ns=1000, after_ns=900, cost_ns=5050)
    assert change.pays_after == 51


def test_what_is_no_faster_never_pays() -> None:
    assert Change(1000, 1000, 0).pays_after is None
    assert Change(1000, 1001, 0).pays_after is None


def test_a_change_that_costs_nothing_pays_at_once() -> None:
    assert Change(1000, 900, 0).pays_after == 0


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**9), st.integers(0, 10**5))
def test_waiting_loses_at_most_twice_what_knowing_would(
    after_ns: int, gain_ns: int, cost_ns: int, stay: int
) -> None:
    """Nodes stay for some iterations; then all is as before. One iteration more, since waits are whole."""
    change = Change(after_ns + gain_ns, after_ns, cost_ns)
    known = min(cost_ns, stay * gain_ns)
    assert change.pays_after is not None
    lost = stay * gain_ns if stay < change.pays_after else change.pays_after * gain_ns + cost_ns
    assert lost <= 2 * known + gain_ns
