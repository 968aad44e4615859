"""Messages of a pair go over a communicator for each direction."""

from __future__ import annotations

import torch.distributed as dist

from swift_ft.torch_adapters.directed_group import DirectedGroup
from swift_ft.torch_adapters.script_operations import ALIKE, PERSONAL
from swift_ft.torch_adapters.versions.group_methods import those_of
from tests.support.nccl_members import LIKE_NCCL, Statements


def test_both_may_send_first() -> None:
    members = Statements(LIKE_NCCL)
    ended = members.run("_messages_by_direction", 2)
    members.close()
    assert ended.codes == [0, 0], ended.output


def test_collectives_go_to_the_group_beneath() -> None:
    names = those_of(dist.ProcessGroup, (*ALIKE, *PERSONAL))
    assert [name for name in names if name not in vars(DirectedGroup)] == []
