"""Batches of messages are given to a backend as a whole, also on groups that are written in Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.nccl_members import LIKE_NCCL, Statements


@pytest.fixture(scope="module")
def members() -> Iterator[Statements]:
    running = Statements(LIKE_NCCL)
    yield running
    running.close()


@pytest.mark.parametrize("name", ["a_batch_sends_and_receives", "_a_batch_of_torchs_own_way"])
def test_a_batch(name: str, members: Statements) -> None:
    ended = members.run(name, 2)
    assert ended.codes == [0, 0], ended.output
