"""What a group of a generation does in another thread, it does on the device of the training thread."""

from __future__ import annotations

import threading

import pytest
import torch

from swift_ft.torch_adapters import process_group


def test_another_thread_works_on_the_caller_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers of a host would form their communicators on its first device."""
    chosen: list[tuple[int, bool]] = []
    main = threading.current_thread()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread() is main))
    )
    formed_on: list[int] = []
    call = process_group._on_this_device(lambda: formed_on.append(chosen[-1][0]))
    other = threading.Thread(target=call)
    other.start()
    other.join()
    assert chosen == [(3, False)]
    assert formed_on == [3]
