"""A wait ends when nothing is under way any more."""

from __future__ import annotations

import threading

from swift_ft.host.under_way import UnderWay


def test_nothing_is_under_way() -> None:
    assert UnderWay().over()


def test_it_waits_for_all_of_them() -> None:
    under_way = UnderWay()
    with under_way:
        with under_way:
            assert not under_way.over(0.01)
        assert not under_way.over(0.01)
    assert under_way.over()


def test_another_thread_ends_the_wait() -> None:
    under_way, waits, ended = UnderWay(), threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        if under_way.over(60):
            ended.set()

    with under_way:
        threading.Thread(target=wait, daemon=True).start()
        assert waits.wait(60)
        assert not ended.is_set()
    assert ended.wait(60)
