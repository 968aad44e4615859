"""The process groups that a script makes: each lives on behind its handle, in all generations.

From :meth:`ScriptGroups.install` on, whatever makes a group (``init_process_group``, ``new_group``, a
``DeviceMesh``) gets a :class:`~swift_ft.torch_adapters.lasting_group.LastingGroup`, registered with torch
under the name and the tags of the group beneath. :meth:`ScriptGroups.renew` recreates that one, with the
arguments of the first time and another store.

Private parts used (tested on torch 2.11 to 2.14):

- ``distributed_c10d._new_process_group_helper``, through which torch makes every group, is replaced.
- ``distributed_c10d._world``: what torch knows of each group; ``group_count`` numbers them, and
  ``pg_coalesce_state`` has what is begun together.
- ``distributed_c10d._register_process_group`` and ``_unregister_process_group``: the names that functional
  collectives resolve.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from swift_ft.config import store_keys
from swift_ft.errors import UsageError
from swift_ft.torch_adapters.gathering import Gathering
from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.rendezvous_store import Store
from swift_ft.torch_adapters.transports import aborts_in_silence
from swift_ft.torch_adapters.versions.coalescing import coalesce_on_all_groups

_c10d: Any = dist.distributed_c10d

_REGISTERS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "pg_coalesce_state")
"""Of torch, by group."""

_NAMES = ("pg_names",)
"""By which torch finds a group that exists already, besides its tags."""

_BACKEND, _STORE = 3, 4
"""Places among the arguments of torch's helper."""


@dataclass
class _Entries:
    """The entries of torch for a group."""

    of_group: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)

    @classmethod
    def take(cls, group: dist.ProcessGroup, names: Sequence[str] = _REGISTERS) -> _Entries:
        """Let torch forget a group, or some of what it knows of it; returns that."""
        world = _c10d._world
        tags = [tag for tag, groups in world.tags_to_pg.items() if group in groups]
        for tag in tags:
            world.tags_to_pg[tag].remove(group)
        registers = ((name, getattr(world, name)) for name in names)
        entries = {name: register.pop(group) for name, register in registers if group in register}
        if "pg_names" in entries:
            _c10d._unregister_process_group(entries["pg_names"])
        return cls(entries, tags)

    def give(self, group: dist.ProcessGroup) -> None:
        """Let torch know this of a group."""
        world = _c10d._world
        for name, entry in self.of_group.items():
            getattr(world, name)[group] = entry
        for tag in self.tags:
            world.tags_to_pg.setdefault(tag, []).append(group)
        if "pg_names" in self.of_group:
            _c10d._register_process_group(self.of_group["pg_names"], group)


class ScriptGroups:
    """All groups of this process's script, in the order in which it made them.

    Attributes:
        forming: what surrounds the making of a group.
    """

    def __init__(self) -> None:
        self.forming: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self._make: Callable[..., Any] | None = None  # torch's own
        self._made: dict[LastingGroup, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._complete = False

    def install(self) -> None:
        """From now on, every group that is made in this process lives on. Before the script begins."""
        coalesce_on_all_groups()
        if self._make is None:
            self._make, _c10d._new_process_group_helper = _c10d._new_process_group_helper, self._new_group

    def complete(self) -> None:
        """The script has made all its groups: it begins to train.

        A replacement must make the same groups, in the same order, before it takes part.
        """
        self._complete = True

    @property
    def groups(self) -> list[LastingGroup]:
        """Those that the script has not destroyed."""
        return [group for group in self._made if group in _c10d._world.pg_map]

    def _new_group(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """In the place of torch's helper."""
        assert self._make is not None
        if self._complete:
            raise UsageError(
                "a process group was made after the first iteration had begun; make all groups before "
                "session.steps(), because a worker that replaces a lost one makes only those"
            )
        if kwargs.get("enable_reconfigure"):  # since torch 2.14
            raise UsageError(
                "init_process_group(enable_reconfigure=True) has no place under a session, which forms all "
                "groups anew after a loss: leave it out"
            )
        # torch would split the groups of a later generation off the one that has ended.
        if (device := kwargs.pop("device_id", None)) is not None:
            LastingGroup.device = device
        with self.forming():
            native, store = self._make(*args, **kwargs)
        if not isinstance(native, dist.ProcessGroup) or isinstance(native, LastingGroup):
            return native, store  # this worker is no member, or torch has found a group that exists
        group = LastingGroup(native)
        _Entries.take(native).give(group)
        self._made[group] = (args, kwargs)
        self._let_meet(group, store)
        return group, store

    def end(self) -> list[dist.ProcessGroup]:
        """Take the groups of torch away from all handles. Returns them; they are shut down.

        What was begun on them together and has raised is forgotten: torch would swallow the next collective,
        which it takes for one of that batch.
        """
        for group in self.groups:
            _c10d._world.pg_coalesce_state.pop(group, None)
        found = [native for group in reversed(self.groups) if (native := group.end()) is not None]
        for native in found:
            forget(native)
        return found

    def renew(self, group: LastingGroup, store: Store) -> None:
        """Recreate the group of torch beneath a handle, together with its other members.

        Args:
            group: one of :attr:`groups`. The default group comes before all others.
            store: where the members of this generation meet.

        Raises:
            RuntimeError: as torch does, if a member does not come in time.
        """
        native = self._remake(group, store)
        self.give_ranks(native, group)
        group.renew(native)
        self._let_meet(group, store)

    def _let_meet(self, group: LastingGroup, store: Any) -> None:
        if aborts_in_silence(group.native):
            folder = dist.PrefixStore(store_keys.members(group.group_name), store)
            group.gathering = Gathering(folder, group.rank(), group.size(), self._timeout(group))

    def give_ranks(self, group: dist.ProcessGroup, like: LastingGroup) -> None:
        """Let torch know the members of a group. Point-to-point operations look up nothing else."""
        for register in ("pg_map", "pg_group_ranks"):
            getattr(_c10d._world, register)[group] = getattr(_c10d._world, register)[like]

    def _remake(self, group: LastingGroup, store: Store) -> dist.ProcessGroup:
        assert self._make is not None
        args, kwargs = self._made[group]
        # Without its names, or torch would find it, instead of making one. The rest stays: meanwhile other
        # threads ask torch about the group, such as DCP's when it writes a checkpoint.
        known = _Entries.take(group, _NAMES)
        try:
            native, _ = self._make(*args[:_STORE], store, *args[_STORE + 1 :], **kwargs)
            assert isinstance(native, dist.ProcessGroup)
            _c10d._world.pg_map[group] = _Entries.take(native).of_group["pg_map"]
        finally:
            known.give(group)
        return native

    def form(self, name: str, ranks: Sequence[int], store: Store) -> dist.ProcessGroup:
        """A group of torch that the script does not know, of the kind of the default group.

        Args:
            name: no other group has it.
            ranks: its members, this worker among them.
            store: where they meet.

        Raises:
            RuntimeError: as torch does, if a member does not come in time.
        """
        assert self._make is not None
        default = self.default
        args, kwargs = self._made[default]
        rank = list(ranks).index(default.rank())
        native, _ = self._make(
            len(ranks), rank, list(ranks), args[_BACKEND], store, name, timeout=kwargs["timeout"]
        )
        assert isinstance(native, dist.ProcessGroup)
        _c10d._world.pg_group_ranks[native] = {of_world: of_group for of_group, of_world in enumerate(ranks)}
        return native

    @property
    def timeout_s(self) -> float:
        """That the script has given to the group of all workers."""
        return self._timeout(self.default).total_seconds()

    def _timeout(self, group: LastingGroup) -> timedelta:
        _, kwargs = self._made[group]
        timeout: timedelta = kwargs["timeout"]
        return timeout

    @property
    def default(self) -> LastingGroup:
        """The group of all workers."""
        group = dist.group.WORLD
        assert isinstance(group, LastingGroup)
        return group


def forget(group: dist.ProcessGroup) -> None:
    """End a group of :meth:`ScriptGroups.form`."""
    group.shutdown()
    _Entries.take(group)


def be_given_own_objects(while_: Callable[[], bool]) -> None:
    """Let ``broadcast_object_list`` give the objects to their source, too.

    In a process that replaces a lost worker: its script may have drawn another seed than the lost one.

    Args:
        while_: whether that holds now.
    """
    original = dist.broadcast_object_list

    @functools.wraps(original)
    def broadcast(object_list: Any, src: Any = None, group: Any = None, **kwargs: Any) -> None:
        if while_():
            place = (
                src if kwargs.get("group_src") is None else dist.get_global_rank(group, kwargs["group_src"])
            )
            if place == dist.get_rank():
                members = dist.get_process_group_ranks(group)
                src = next((rank for rank in members if rank != place), src)
                kwargs.pop("group_src", None)
        original(object_list, src, group, **kwargs)

    public: Any = dist
    public.broadcast_object_list = _c10d.broadcast_object_list = broadcast


script_groups = ScriptGroups()
"""Those of this process."""
