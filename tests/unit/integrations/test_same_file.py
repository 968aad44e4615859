"""Files of two runs are compared bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster import ClusterRun
from tests.support.integrations import assert_same_file


def run(folder: Path, content: Any) -> ClusterRun:
    """A run that wrote one file."""
    (folder / "out").mkdir(parents=True)
    torch.save(content, folder / "out" / "worker")
    return ClusterRun(folder, 0, "", {})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (1, True, False),
        ([], [1], False),
        (torch.arange(10.0)[::2], torch.arange(10.0)[::2].clone(), True),
    ],
)
def test_same_is_bit_for_bit(tmp_path: Path, one: Any, other: Any, same: bool) -> None:
    ours, theirs = (run(tmp_path / str(n), {"a": [value], "b": 1}) for n, value in enumerate((one, other)))
    if same:
        assert_same_file(ours, theirs, "worker")
    else:
        with pytest.raises(AssertionError):
            assert_same_file(ours, theirs, "worker")


def test_a_part_of_the_names_can_be_left_out(tmp_path: Path) -> None:
    ours, theirs = run(tmp_path / "one", {"a": [1], "b": 1}), run(tmp_path / "other", {"a": [2], "b": 1})
    assert_same_file(ours, theirs, "worker", but=(".a.",))
    with pytest.raises(AssertionError, match=r"\['.a.0'\] of worker differ"):
        assert_same_file(ours, theirs, "worker", but=(".b",))
