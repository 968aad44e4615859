"""A batch of messages on a group that lives on, over a backend that takes batches as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.nccl_members import LIKE_NCCL, Statements


@pytest.fixture(scope="module")
def members() -> Iterator[Statements]:
    running = Statements(LIKE_NCCL)
    yield running
    running.close()


@pytest.mark.parametrize("what", ["batch_is_aborted", "batch_raises", "batch_is_served"])
def test_what_is_known_of_a_batch(what: str, members: Statements) -> None:
    """Nothing of one that did not end is left when groups have been formed anew."""
    ended = members.run(what, 2)
    assert ended.codes == [0, 0], ended.output


def test_in_a_replay_of_some_members(members: Statements) -> None:
    """The communicator of all members would wait for the others."""
    ended = members.run("batch_without_an_absent_member", 3)
    assert ended.codes == [0, 0, 0], ended.output
