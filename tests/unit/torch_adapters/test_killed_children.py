"""What the errors of torch and of Python's pools say of processes that were killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from swift_ft.launch.processes.script_error import whose_fault
from swift_ft.recovery.causes import Cause
from swift_ft.torch_adapters.killed_children import KilledChild, killed_child, watch_pools
from tests.support.waiting import wait_until

BY_SIGKILL = KilledChild("a process of a data loader was killed by SIGKILL", "SIGKILL")


class Rows(Dataset[int]):
    """Its second row ends the process that reads it, or fails."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index == 1:
            if self.number > 0:
                os.kill(os.getpid(), self.number)
            if self.number < 0:
                os._exit(-self.number)
            raise LookupError("no such row")
        return index


def error_of(number: int) -> BaseException:
    with pytest.raises((RuntimeError, LookupError)) as raised:
        list(DataLoader(Rows(number), batch_size=None, num_workers=1))
    return raised.value


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (signal.SIGKILL, ""),
        (signal.SIGSEGV, ""),
        (signal.SIGBUS, ". It is possible that dataloader's workers are"),
    ],
)
def test_a_killed_process_of_a_loader(number: signal.Signals, hint: str) -> None:
    killed = killed_child(error_of(number))
    assert killed is not None
    assert killed.signal == number.name
    assert killed.words.startswith(f"a process of a data loader was killed by {number.name}{hint}")
    with pytest.raises(ValueError, match="no batch") as raised:
        _raise_from(error_of(number))
    assert killed_child(raised.value) is not None


def _raise_from(error: BaseException) -> NoReturn:
    raise ValueError("no batch") from error


class Slow(Dataset[torch.Tensor]):
    """Its second row never comes. The process that is to make it says so in a file."""

    def __init__(self, stands: Path) -> None:
        self._stands = stands

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1:
            self._stands.touch()
            signal.pause()
        return torch.zeros(4)


@pytest.mark.parametrize("found_dead", [True, False])
def test_a_process_that_is_killed_after_it_has_announced_a_batch(found_dead: bool, tmp_path: Path) -> None:
    """The batch lies in shared memory, whose descriptor comes from the process.

    The connection may break before the loader can find the process dead. Between two rows the process may
    have a lock of the loader's, which nobody would ever give back.
    """
    stands = tmp_path / "stands"
    loader: Any = iter(DataLoader(Slow(stands), batch_size=None, num_workers=1))
    wait_until(lambda: stands.exists() and not loader._worker_result_queue.empty(), "the first batch")
    (process,) = loader._workers
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises at any line
    try:
        process.kill()
        process.join(60)
        if not found_dead:
            process.is_alive = lambda: True
        with pytest.raises(RuntimeError if found_dead else (OSError, EOFError)) as raised:
            next(loader)
    finally:
        signal.signal(signal.SIGCHLD, before)
        vars(process).pop("is_alive", None)
    assert killed_child(raised.value) == BY_SIGKILL


def test_another_file_that_is_missing_is_the_scripts() -> None:
    with pytest.raises(FileNotFoundError) as raised:
        open("/nowhere")  # noqa: SIM115, PTH123 (it does not open)
    assert killed_child(raised.value) is None


@pytest.mark.parametrize("number", [0, -3])
def test_an_error_or_an_end_of_its_own_is_the_scripts(number: int) -> None:
    assert killed_child(error_of(number)) is None


def error_of_pool(act: Callable[..., object], *args: Any, **options: Any) -> BaseException:
    """What a call in a pool of two processes raises, which is gone by then."""
    watch_pools()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), **options) as pool:
        error = pool.submit(act, *args).exception(60)
    assert isinstance(error, BrokenProcessPool)
    return error


def test_a_killed_process_of_a_pool() -> None:
    error = error_of_pool(_kill_itself)
    assert killed_child(error) == KilledChild("a process of a pool was killed by SIGKILL", "SIGKILL")


def _kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> NoReturn:
    raise LookupError("no such tokenizer")


@pytest.mark.parametrize(
    ("act", "options"), [(partial(os._exit, 1), {}), (os.getpid, {"initializer": _fail})]
)
def test_a_pool_that_broke_without_a_signal_is_the_scripts(
    act: Callable[..., object], options: dict[str, Any]
) -> None:
    """The pool itself ends its other processes by a signal then."""
    error = error_of_pool(act, **options)
    assert killed_child(error) is None
    assert whose_fault(error)["cause"] == Cause.SCRIPT


class Lingers:
    """A process that has closed its files, and has not ended before somebody waits for that."""

    def __init__(self) -> None:
        self.sentinel, its_end = os.pipe()
        os.close(its_end)
        self.exitcode: int | None = None

    def join(self, _timeout_s: float) -> None:
        self.exitcode = -signal.SIGKILL


class Loader(_MultiProcessingDataLoaderIter):
    def __init__(self, process: Any) -> None:
        self._workers = [process]

    def fetch(self) -> NoReturn:
        raise ConnectionResetError("Connection reset by peer")

    def __del__(self) -> None:
        """It has started nothing."""


def test_a_process_ends_a_moment_after_its_files() -> None:
    process = Lingers()
    with pytest.raises(ConnectionResetError) as raised:
        Loader(process).fetch()
    assert killed_child(raised.value) == BY_SIGKILL
    os.close(process.sentinel)
