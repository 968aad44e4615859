"""Clocks are aligned by what their hosts saw of the journal, as far as that bounds them."""

from __future__ import annotations

import random

import pytest

from swift_ft.observe.spans import Recording
from swift_ft.offline.clock_alignment import align

MS = 1_000_000


def recording(
    own: list[tuple[int, int]], seen: list[tuple[int, int, int]], *, began: int = 0, unix: int = 0
) -> Recording:
    return Recording(began, began, unix, (), tuple(seen), tuple(own), 0)


def journal(
    skews: dict[str, int], *, events: int, seed: int, delays_ms: float = 20.0
) -> dict[str, list[Recording]]:
    """Recordings of hosts whose clocks are that much ahead of the true time, and which append in turn."""
    rng = random.Random(seed)
    own: dict[str, list[tuple[int, int]]] = {name: [] for name in skews}
    seen: dict[str, list[tuple[int, int, int]]] = {name: [] for name in skews}
    true = 10_000 * MS
    for position in range(events):
        author = list(skews)[position % len(skews)]
        true += round(rng.uniform(0, 50) * MS)
        own[author].append((position, true + skews[author]))
        for name, skew in skews.items():
            arrives = true + round(rng.uniform(0.1, delays_ms) * MS)
            seen[name].append((position, position, arrives + skew))
    return {name: [recording(own[name], seen[name])] for name in skews}


@pytest.mark.parametrize("seed", range(20))
def test_skewed_clocks(seed: int) -> None:
    skews = {"a": 0, "b": 7_000_000 * MS, "c": -3_000 * MS, "d": 5}
    clocks = align(journal(skews, events=16, seed=seed), "a")
    assert (clocks["a"].shift, clocks["a"].uncertainty) == (0, 0)
    for name, skew in skews.items():
        uncertainty = clocks[name].uncertainty
        assert uncertainty is not None
        assert abs(clocks[name].shift + skew) <= uncertainty <= 20 * MS


def test_any_clock_may_be_the_reference() -> None:
    skews = {"a": 0, "b": 40 * MS}
    found = journal(skews, events=10, seed=1)
    there, back = align(found, "a")["b"], align(found, "b")["a"]
    assert abs(there.shift + back.shift) <= 1  # a nanosecond of rounding
    assert there.uncertainty == back.uncertainty


def test_more_entries_bound_it_tighter() -> None:
    skews = {"a": 0, "b": 40 * MS}
    few, many = (align(journal(skews, events=n, seed=3), "a")["b"].uncertainty for n in (2, 40))
    assert few is not None
    assert many is not None
    assert many < few


def test_one_side_only() -> None:
    home = recording([(1, 100)], [])
    reader = recording([], [(0, 4, 350)])  # which saw it later, by a clock that is ahead by 200 at most
    clock = align({"home": [home], "reader": [reader]}, "home")["reader"]
    assert (clock.shift, clock.uncertainty) == (-250, None)
    clock = align({"home": [home], "reader": [reader]}, "reader")["home"]
    assert (clock.shift, clock.uncertainty) == (250, None)


def test_without_a_common_entry_unix_times_must_do() -> None:
    home = recording([(1, 100)], [], began=100, unix=1_000_100)
    other = recording([(2, 70)], [(3, 9, 80)], began=50, unix=1_000_250)
    clock = align({"home": [home], "other": [other]}, "home")["other"]
    assert (clock.shift, clock.uncertainty) == (200, None)


def test_processes_of_a_host_share_what_they_know() -> None:
    home = recording([(1, 100)], [(2, 2, 130)])
    agent = recording([(2, 1120)], [])
    worker = recording([], [(1, 1, 1104)])
    clock = align({"home": [home], "other": [agent, worker]}, "home")["other"]
    assert (clock.shift, clock.uncertainty) == (-997, 7)  # from -1004 to -990
