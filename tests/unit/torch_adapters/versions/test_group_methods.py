"""Conformance: each method of a group and of an operation of the installed torch acts on what is beneath."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed as dist

from swift_ft.errors import UsageError
from swift_ft.torch_adapters.lasting_group import FORWARDED, REFUSED, LastingGroup
from swift_ft.torch_adapters.lasting_work import ASKED, OF_WORK, STREAM_WAITS, LastingWork
from swift_ft.torch_adapters.script_groups import ScriptGroups
from swift_ft.torch_adapters.script_operations import ALIKE, PERSONAL, POINT_TO_POINT
from swift_ft.torch_adapters.versions.group_hooks import WHEN
from swift_ft.torch_adapters.versions.group_methods import NOT_IN_ALL, those_of

OWN = {
    *("rank", "size", "shutdown", "abort", "group_name", "group_desc", "bound_device_id", "_device_types"),
    *("supports_window", "supports_reconfigure", "_start_coalescing", "_end_coalescing"),
    "_get_backend",
    *(f"{verb}_{when}_hook" for verb in ("register", "unregister") for when in WHEN),
}
NOT_ASKED_FOR = {
    *("boxed", "unbox", "BackendType", "_set_group_name", "_set_group_desc", "_pybind11_conduit_v1_"),
    *("use_pg_for_symm_mem_rendezvous", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
}


def methods_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("__")}


def test_every_method_of_a_group_of_torch_is_known() -> None:
    """One that a new version of torch adds would act on the handle, and not on the group beneath."""
    known = {*ALIKE, *PERSONAL, *POINT_TO_POINT, *FORWARDED, *REFUSED, *OWN}
    assert methods_of(dist.ProcessGroup) - known - NOT_ASKED_FOR == set()
    assert known - methods_of(dist.ProcessGroup) <= NOT_IN_ALL
    ours = those_of(dist.ProcessGroup, tuple(known - {"rank", "size"}))
    assert [name for name in ours if name not in vars(LastingGroup)] == []


def test_every_method_of_an_operation_is_known() -> None:
    known = {*OF_WORK, *STREAM_WAITS, *ASKED, "wait", "get_future", "timeout"}
    assert methods_of(dist.Work) - known - {"boxed", "unbox", "_pybind11_conduit_v1_"} == set()
    assert known - methods_of(dist.Work) <= NOT_IN_ALL
    assert [name for name in those_of(dist.Work, tuple(known)) if name not in vars(LastingWork)] == []


def test_a_method_that_torch_lacks_is_not_there() -> None:
    """Scripts and torch itself ask a group what it has."""
    assert those_of(dist.ProcessGroup, ("allreduce", "no_such_method")) == ("allreduce",)
    lacks = NOT_IN_ALL - methods_of(dist.ProcessGroup) - {"supports_window", "supports_reconfigure"}
    assert [name for name in lacks if hasattr(LastingGroup, name)] == []


def test_a_group_that_the_script_would_reconfigure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dist.distributed_c10d
    monkeypatch.setattr(module, "_new_process_group_helper", module._new_process_group_helper)  # put back
    groups = ScriptGroups()
    groups.install()
    arguments = inspect.signature(dist.init_process_group).parameters
    assert ("enable_reconfigure" in arguments) == hasattr(dist.ProcessGroup, "reconfigure")
    if "enable_reconfigure" in arguments:
        init: Any = dist.init_process_group
        with pytest.raises(UsageError, match="leave it out"):
            init("gloo", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
    assert groups.groups == []
