"""Conformance: the hooks of a group of the installed torch, over a change of the group beneath a handle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.lasting_group import REFUSED, LastingGroup
from swift_ft.torch_adapters.versions.group_hooks import WHEN
from swift_ft.torch_adapters.versions.group_methods import those_of


@pytest.fixture
def natives(one_process: None) -> list[Any]:
    return [dist.group.WORLD, dist.new_group([0])]


def test_hooks_live_on_with_the_handle(natives: list[Any]) -> None:
    handle: Any = LastingGroup(natives[0])
    if not WHEN:
        assert not hasattr(dist.ProcessGroup, "register_pre_hook")
        assert not hasattr(handle, "register_pre_hook")
        return
    seen: list[str] = []
    handle.register_pre_hook(1, lambda _: seen.append("before"))
    handle.register_post_hook(1, lambda _: seen.append("after"))
    for native in natives:
        handle.renew(native)
        seen.clear()
        handle.allreduce([torch.ones(1)]).wait()
        assert seen == ["before", "after"]
    handle.unregister_pre_hook(1)
    seen.clear()
    handle.renew(dist.new_group([0]))
    handle.allreduce([torch.ones(1)]).wait()
    assert seen == ["after"]


def test_what_cannot_live_on_is_refused(natives: list[Any]) -> None:
    handle: Any = LastingGroup(natives[0])
    for name in those_of(dist.ProcessGroup, tuple(REFUSED)):
        with pytest.raises(UnsupportedError, match=name):
            getattr(handle, name)()
    assert not handle.supports_window
    assert not handle.supports_reconfigure
