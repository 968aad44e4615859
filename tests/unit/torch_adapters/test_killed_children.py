"""What the errors of torch and of Python's pools say of processes that were killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NoReturn

import pytest
from torch.utils.data import DataLoader, Dataset

from swift_ft.torch_adapters.killed_children import killed_child


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_killed_process_of_a_loader(number: int) -> None:
    assert killed_child(error_of(number)).startswith("a process of a data loader was killed by ")
    with pytest.raises(ValueError, match="no batch") as raised:
        _raise_from(error_of(number))
    assert killed_child(raised.value)


def _raise_from(error: BaseException) -> NoReturn:
    raise ValueError("no batch") from error


@pytest.mark.parametrize("number", [0, -3])
def test_an_error_or_an_end_of_its_own_is_the_scripts(number: int) -> None:
    assert killed_child(error_of(number)) == ""


def test_a_killed_process_of_a_pool() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        error = pool.submit(os.getpid).exception(60)
        assert error is None
        error = pool.submit(os._exit, 1).exception(60)
    assert error is not None
    assert killed_child(error) == "a process of a pool ended abruptly"
