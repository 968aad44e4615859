"""Messages of a pair go over a communicator for each direction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from swift_ft.torch_adapters.directed_group import DirectedGroup
from swift_ft.torch_adapters.script_operations import ALIKE, PERSONAL
from swift_ft.torch_adapters.versions.group_methods import those_of
from tests.support.nccl_members import LIKE_NCCL, Statements


@pytest.fixture(scope="module")
def members() -> Iterator[Statements]:
    running = Statements(LIKE_NCCL)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("what", "size"),
    [("messages_by_direction", 2), ("all_receive_first", 3), ("no_pair_forms_once_it_is_left", 2)],
)
def test_members(what: str, size: int, members: Statements) -> None:
    ended = members.run(what, size)
    assert ended.codes == [0] * size, ended.output


def test_collectives_go_to_the_group_beneath() -> None:
    names = those_of(dist.ProcessGroup, (*ALIKE, *PERSONAL))
    assert [name for name in names if name not in vars(DirectedGroup)] == []
