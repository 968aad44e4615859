"""A sample that cannot be made is told from the script's other errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.error import URLError

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from swift_ft.errors import CheckpointError
from swift_ft.launch.processes.script_error import whose_fault
from swift_ft.recovery.causes import Cause


class Digits(Dataset[float]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        if index == 5:
            raise ValueError("it has no label")
        return decoded(index)


class Stream(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        yield 1.0
        raise ValueError("the stream is cut")


class InBatches(Digits):
    def __getitems__(self, indices: list[int]) -> list[float]:
        raise ValueError(f"one of {len(indices)} is bad")


class Elsewhere(Digits):
    """The file of its samples is in the store."""

    def __getitem__(self, index: int) -> float:
        raise CheckpointError("the store does not answer")


class Remote(Dataset[float]):
    """Its samples are on a server, whose client raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        raise self.error


class ServerError(TimeoutError):
    """One that torch cannot make again from a text."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{code}: {words}\nand more")


def decoded(index: int) -> float:
    if index == 7:
        raise ValueError("it cannot be decoded")
    return float(index)


def read(dataset: Any, **options: Any) -> BaseException:
    """The error of a loader that reads all of a dataset."""
    with pytest.raises((ValueError, CheckpointError, OSError, RuntimeError)) as raised:
        for _ in DataLoader(dataset, batch_size=2, **options):
            pass
    return raised.value


@pytest.mark.parametrize(
    ("dataset", "words", "function"),
    [
        (Digits(), "sample 5 of Digits", "__getitem__"),
        (
            Subset(Digits(), [0, 2, 1, 7]),
            "sample 7 of Digits",
            "decoded",
        ),  # its number in the user's own dataset
        (InBatches(), "sample [0, 1] of InBatches", "__getitems__"),
        (Stream(), "a sample of Stream", "__iter__"),
    ],
)
def test_the_sample_is_named(dataset: Any, words: str, function: str) -> None:
    found = whose_fault(read(dataset))
    assert found["cause"] == Cause.DATA
    place, said = found["at"]
    assert said == words
    assert place.startswith("test_bad_samples.py:")
    assert place.endswith(f", in {function}")


def test_a_sample_of_a_loaders_process_is_said_in_its_own_words() -> None:
    """Not in the first line of what torch makes of it, which is the same for all errors."""
    error = read(Digits(), num_workers=1)
    found = whose_fault(error)
    assert found["cause"] == Cause.DATA
    place, said = found["at"]
    assert place.startswith("test_bad_samples.py:")
    assert place.endswith(", in __getitem__")
    assert said == "in DataLoader worker process 0"
    assert found["failed"] == "ValueError: it has no label"


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TimeoutError("timed out"), Cause.NETWORK),
        (ServerError(503, "no answer"), Cause.NETWORK),
        (URLError(OSError(113, "No route to host")), Cause.NETWORK),
        (OSError(101, "Network is unreachable"), Cause.NETWORK),
        (OSError(5, "Input/output error", "/data/7.bin"), Cause.STORE),
        (OSError(28, "No space left on device"), Cause.DATA),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), Cause.DATA),
    ],
    ids=str,
)
def test_an_outage_is_no_fault_of_the_sample(error: Exception, cause: Cause, processes: int) -> None:
    """It may be over at the next start, and so it ends no run that meets it twice."""
    found = whose_fault(read(Remote(error), num_workers=processes))
    assert found["cause"] == cause
    assert f"{type(error).__name__}: " in found["failed"]
    place, said = found["at"]
    assert place.endswith(", in __getitem__")
    assert said == ("in DataLoader worker process 0" if processes else "sample 0 of Remote")


def test_an_error_that_is_no_samples() -> None:
    assert whose_fault(read(Elsewhere()))["cause"] == Cause.STORE  # the sample is not to blame

    def loop() -> None:
        for _ in DataLoader(Digits(), batch_size=2):
            raise ValueError("of the loop")

    with pytest.raises(ValueError, match="of the loop") as raised:
        loop()
    assert whose_fault(raised.value)["cause"] == Cause.SCRIPT
    assert whose_fault(raised.value)["failed"] == "ValueError: of the loop"
