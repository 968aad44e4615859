"""Which links are slow: by what the kernel measured, and only where it matters and lasts."""

from __future__ import annotations

from dataclasses import replace

from swift_ft.costs.slow_links import LinkSample, SlowLinks

FAST = LinkSample(0, "10.0.0.2", 0.2, 1e9)
SLOW = LinkSample(0, "10.0.0.1", 0.5, 1e8)


def judged(links: SlowLinks, *samples: LinkSample, times: int, since: int = 0) -> list[dict[int, bool]]:
    """What is said of samples that come so many times."""
    found = [
        links.judge({rank: replace(one, number=since + number) for rank, one in enumerate(samples)})
        for number in range(times)
    ]
    return [one for one in found if one]


def test_a_link_that_stays_slow_is_named_once() -> None:
    links = SlowLinks()
    assert judged(links, FAST, SLOW, FAST, times=20) == [{1: True}]
    assert links.slow == {1: "10.0.0.1"}


def test_it_is_fast_again() -> None:
    links = SlowLinks()
    judged(links, FAST, SLOW, times=4)
    assert judged(links, FAST, replace(SLOW, bytes_per_s=9e8), times=9, since=9) == [{1: False}]
    assert links.slow == {}


def test_what_does_not_last_is_not_named() -> None:
    links = SlowLinks()
    for since in range(0, 100, 10):
        assert judged(links, FAST, SLOW, times=3, since=since) == []
        assert judged(links, FAST, FAST, times=1, since=since + 5) == []


def test_the_same_sample_counts_once() -> None:
    links = SlowLinks()
    assert not any(links.judge({0: FAST, 1: SLOW}) for _ in range(10))


def test_a_link_that_takes_little_of_the_time_does_not_matter() -> None:
    assert judged(SlowLinks(), FAST, replace(SLOW, busy=0.05), times=10) == []


def test_all_are_slow() -> None:
    assert judged(SlowLinks(), SLOW, SLOW, SLOW, times=10) == []


def test_nobody_to_compare_with() -> None:
    assert judged(SlowLinks(), SLOW, times=10) == []


def test_another_link_of_the_same_worker_begins_anew() -> None:
    links = SlowLinks()
    assert judged(links, FAST, SLOW, times=3) == []
    assert judged(links, FAST, replace(SLOW, peer="10.0.0.9"), times=3, since=5) == []
