"""Data sets of Hugging Face: by index, or as a stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from swift_ft.data import GlobalBatches, LoaderBatches
from swift_ft.data.order import SampleOrder
from swift_ft.errors import UsageError
from tests.support.integrations import needs

pytestmark = needs("datasets")


def numbers() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"x": list(range(50)), "text": [str(number) for number in range(50)]})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_global_batches(num_workers: int) -> None:
    parts = [
        GlobalBatches(
            numbers().with_format("torch"), 10, shuffle=True, replicas=2, replica=n, num_workers=num_workers
        )
        for n in range(2)
    ]
    order = SampleOrder([50], shuffle=True, seed=0).at(0, 100)
    for index in (0, 1, 7, 3):
        found = [part[index] for part in parts]
        expected = order[10 * index : 10 * index + 10]
        assert torch.cat([batch["x"] for batch in found]).tolist() == expected
        assert [text for batch in found for text in batch["text"]] == [str(number) for number in expected]
    for part in parts:
        part.close()


def test_a_data_set_that_has_changed() -> None:
    """Its fingerprint is that of the data and of all that was done to it, in any process."""
    state = GlobalBatches(numbers().map(_doubled), 10).state_dict()
    assert state["identity"]
    GlobalBatches(numbers().map(_doubled), 10).load_state_dict(state)
    with pytest.raises(UsageError, match="identity was"):
        GlobalBatches(numbers(), 10).load_state_dict(state)


def _doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": 2 * sample["x"]}


def test_a_stream() -> None:
    """It has no length, and shuffles by its epoch."""
    stream = numbers().to_iterable_dataset().shuffle(seed=3, buffer_size=20)
    with pytest.raises(UsageError, match="give length="):
        LoaderBatches(DataLoader(stream, 10))
    batches = LoaderBatches(DataLoader(stream, 10), length=5)
    epochs = [[batches[index]["x"].tolist() for index in range(5 * n, 5 * n + 5)] for n in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(number for batch in epoch for number in batch) == list(range(50))
    assert batches[2]["x"].tolist() == epochs[0][2]
    assert batches[8]["x"].tolist() == epochs[1][3]
    with pytest.raises(UsageError, match="ended after 5 batches of 6"):
        LoaderBatches(DataLoader(stream, 10), length=6)[5]
