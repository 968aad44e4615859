"""Partners: workers that replay together because of what the script communicates, known before it happens."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swift_ft.config import store_keys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.costs.job import ScriptGroup
from swift_ft.observe.waits import waiting
from swift_ft.runtime.pipeline.script_communication import GroupUse
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)


@dataclass
class ScriptPartners:
    """Publishes what one worker has to replay together with others.

    Attributes:
        rendezvous: a client of the rendezvous store, which outlives machines.
        writer: writes in the background.
        rank: this worker.
        world_size: number of workers.
        lost_with: the workers that are lost and replayed together with one in any case.
        replicated: whether each worker has replicas, so that a loss takes no replay as a rule.
    """

    rendezvous: RendezvousStore
    writer: BackgroundWriter
    rank: int
    world_size: int
    lost_with: Callable[[int], Iterable[int]]
    replicated: Callable[[], bool]
    _shown: str = ""

    def known(self) -> tuple[tuple[int, ...], str]:
        """The partners of the worker that this one replaces, and the call that demands it."""
        return self._of(self.rank)

    def announce(self, partners: Iterable[int], why: str, use: GroupUse) -> None:
        """Publish all partners of this worker. It communicates with the new ones right afterwards.

        Args:
            partners: with the new ones.
            why: the first call that demands it; empty if they are lost together anyway.
            use: of the group that brings them.
        """
        value = json.dumps({"ranks": sorted(partners), "why": why})
        self.rendezvous.set(store_keys.script_together(self.rank), value)
        bridges = not {*partners} <= {*use.members}
        if not use.why or self.replicated() or not (bridges or self.rank == use.members[0]):
            return  # one of the members looks at all of them; who has other partners as well adds those
        all_are = self._closure(partners) == {*range(self.world_size)}
        if all_are and self.rendezvous.add(store_keys.script_warned(), 1) == 1:
            _logger.warning(
                "%s. No log has that, so these workers can only replay together, and with their own partners "
                "they are all workers. After a loss all return to the last checkpoint. To replay, send "
                "less, use collectives that give all members the same, or raise script_log_limit_bytes.",
                use.why,
                extra={"event": "no_replay_possible"},
            )
        elif not all_are and self.rank == use.members[0]:
            _logger.info("%s, so they replay together", use.why, extra={"event": "replay_together"})

    def _closure(self, partners: Iterable[int]) -> set[int]:
        found, due = set[int](), [self.rank, *partners]
        while due and len({*found, *due}) < self.world_size:
            if (rank := due.pop()) not in found:
                found.add(rank)
                due += [*self._of(rank)[0], *self.lost_with(rank)]
        return {*found, *due}

    def _of(self, rank: int) -> tuple[tuple[int, ...], str]:
        key = store_keys.script_together(rank)
        if not self.rendezvous.check([key]):
            return (), ""
        facts = json.loads(self.rendezvous.get(key))
        return tuple(facts["ranks"]), str(facts["why"])

    def publish(self, uses: Iterable[GroupUse]) -> None:
        """Publish how the groups are used, if there is news. Returns at once."""
        shown = json.dumps(
            [[*use.members, int(use.together), use.most, use.why] for use in uses if len(use.members) > 1]
        )
        if shown != self._shown:
            self._shown = shown
            self.writer.set(store_keys.script_groups(self.rank), shown)


def groups_of_script(rendezvous: RendezvousStore, world_size: int) -> tuple[ScriptGroup, ...]:
    """The groups of all workers' scripts, as far as they were used, each once."""
    found: dict[tuple[int, ...], ScriptGroup] = {}
    keys = [store_keys.script_groups(rank) for rank in range(world_size)]
    if not rendezvous.check(keys):  # some have not begun a step yet
        keys = [key for key in keys if rendezvous.check([key])]
    with waiting("the rendezvous store to say which groups scripts use"):
        published = rendezvous.multi_get(keys) if keys else []
    for text in published:
        for *members, together, nbytes, why in json.loads(text):
            ranks = tuple(members)
            one = ScriptGroup(ranks, bool(together), nbytes, why)
            known = found.get(ranks)
            if known is None or (one.together, one.nbytes) > (known.together, known.nbytes):
                found[ranks] = one
    return tuple(found[ranks] for ranks in sorted(found))
