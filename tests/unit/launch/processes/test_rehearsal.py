"""A worker that is forked ahead makes ready. What it does to its memory: test_heap.py, test_pages.py."""

from __future__ import annotations

import pytest
import torch

from swift_ft.launch.processes import rehearsal


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The memory of this process stays as it is. Whether the job was there when it was to be changed."""
    seen: list[bool] = []
    for name in ("map_ahead", "copy_shared"):
        monkeypatch.setattr(rehearsal, name, lambda is_needed: seen.append(is_needed()))
    return seen


def test_no_thread_is_started(monkeypatch: pytest.MonkeyPatch, looks: list[bool]) -> None:
    """Where a process had threads of OpenMP and has forked, its child waits for them for ever."""
    monkeypatch.setattr(rehearsal, "_train", lambda: pytest.fail("a toy was trained with two threads"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rehearsal.rehearse(lambda: False)
    assert looks == [False, False]


def test_it_has_as_many_threads_as_the_job_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """swift-run sets the variable after torch was imported."""
    threads, trained = [2], []
    for accelerator in ("cuda", "hip", "xpu"):  # torch's build for the host alone
        monkeypatch.setattr(torch.version, accelerator, None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(rehearsal, "_train", lambda: trained.append(True))
    rehearsal.rehearse(lambda: False)
    assert trained


def test_random_numbers_stay_what_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = torch.get_rng_state()
    rehearsal.rehearse(lambda: False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_job_that_is_there_waits_for_none_of_it(monkeypatch: pytest.MonkeyPatch, looks: list[bool]) -> None:
    monkeypatch.setattr(rehearsal, "_train", lambda: pytest.fail("the job had to wait"))
    rehearsal.rehearse(lambda: True)
    assert looks == [True, True]
