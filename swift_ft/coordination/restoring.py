"""A store that was restarted, empty: the machines that survived republish what they hold.

Each agent has a copy of the journal as the store had it (:class:`JournalCopy`), and of the keys that its
machine set (`kept_keys.py`). An agent that meets an empty store

1. takes no more blocks from the store before (it *seals* its copy), so its position is final;
2. sets the keys of its machine, and offers its position in the journal;
3. waits for the offers of all other machines, except those that one has seen die, until a deadline;
4. sets the keys of those for which it holds them, unless these have done so themselves;
5. writes the journal under a new incarnation, if no other machine has read further;
6. sets the incarnation by compare-and-set. From then on the store counts.

So two that republish do not mix: what each writes has keys of its own, and the first one to set the
incarnation wins. A machine that has read further than what was republished is out (``FencedError``): it was
silent for as long as one that is lost. What the others had read is whole: an event in any offer is in the
longest one.

If the keys of a machine are gone, since its holder was lost with it and with the store, then nothing is
republished and the run ends: a recovery would go on from facts that are not there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistStoreError

from swift_ft.config import store_keys
from swift_ft.coordination.block_log import republish, republished_to
from swift_ft.coordination.incarnations import NOT_RESTORED, incarnation_of, new_incarnation
from swift_ft.coordination.kept_keys import KeptKeys, absent
from swift_ft.errors import FencedError
from swift_ft.observe.waits import waiting
from swift_ft.recovery.snapshot import JournalSnapshot, snapshot_to_text
from swift_ft.torch_adapters.rendezvous_store import Store

_logger = logging.getLogger(__name__)

_LEAST_GATHER_S = 5.0
"""A machine that lives may take so long to find the new store, on a busy host."""
_LOOK_S, _LOOK_EACH_S = 0.25, 0.002
"""Poll interval for offers, and its growth per machine: every machine polls."""
_KEYS_S = 5.0
"""So long after the offers a machine may take to set the keys that it holds."""
_PUBLISH_S = 20.0
"""For so long the one that has read furthest is waited for. Then it counts as lost."""


class JournalCopy:
    """A copy of the store's journal: the blocks since a snapshot. It is short as long as the store's is.

    Owner: the journal thread, but for what is sealed and read while the store is restored.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._before: JournalSnapshot | None = None
        self._first = 0
        self._blocks: list[str] = []
        self._sealed = False
        self._epoch = 0
        self._refused: FencedError | None = None

    @property
    def end(self) -> int:
        """The number after the last block."""
        with self._changed:
            return self._first + len(self._blocks)

    def epoch(self, timeout_s: float) -> int | None:
        """The number of the store's epoch, for :meth:`take`. None if the copy stays sealed for ``timeout_s``.

        Raises:
            FencedError: as :meth:`refuse` was given it.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._sealed or self._refused is not None, timeout_s)
            if self._refused is not None:
                raise self._refused
            return None if self._sealed else self._epoch

    def take(self, number: int, text: str, epoch: int) -> bool:
        """Keep the next block. False if it was waited for in the store before, and may not be in this one."""
        with self._changed:
            if self._sealed or epoch != self._epoch:
                return False
            if number == self._first + len(self._blocks):
                self._blocks.append(text)
            return True

    def begin_from(self, snapshot: JournalSnapshot) -> None:
        """Go on from a snapshot: what is before it was not read."""
        with self._changed:
            if snapshot.number > self._first + len(self._blocks):
                self._before, self._first = snapshot, snapshot.number
                self._blocks.clear()

    def drop_before(self, snapshot: JournalSnapshot) -> None:
        """Forget what a snapshot covers. The store may do so, too: it is archived, where anything is."""
        with self._changed:
            if self._first < snapshot.number <= self._first + len(self._blocks):
                del self._blocks[: snapshot.number - self._first]
                self._before, self._first = snapshot, snapshot.number

    def seal(self) -> int:
        """Take no block any more. Returns :attr:`end`."""
        with self._changed:
            self._sealed = True
            return self._first + len(self._blocks)

    def unseal(self) -> None:
        """Take blocks of the store as it is now."""
        with self._changed:
            if self._sealed:
                self._epoch += 1
                self._sealed = False
                self._changed.notify_all()

    def refuse(self, error: FencedError) -> None:
        """End those that read through this copy: the others do not go on with what it has."""
        with self._changed:
            self._refused = error
            self._changed.notify_all()

    def publish(self, store: Store, incarnation: str) -> None:
        """Write it into a store."""
        with self._changed:
            before, first, blocks = self._before, self._first, list(self._blocks)
        republish(store, incarnation, first, snapshot_to_text(before) if before is not None else "", blocks)


class Roster(NamedTuple):
    """The possible holders of the journal, as one machine knows them.

    Attributes:
        own: this machine.
        members: they have workers, or are about to.
        spares: they follow the journal as well.
        fenced: machines that were lost. What they had set is needed by those that replace them.
        lost: members and spares that this machine has seen die, of which the journal does not know yet.
    """

    own: str
    members: Collection[str]
    spares: Collection[str]
    fenced: Collection[str]
    lost: Collection[str]


class Restorer:
    """One agent's part. It is what admits a store to the agent's clients.

    Args:
        kept: the keys of this machine.
        roster: who may hold the journal; None before this agent has read any of it.
        gather_s: seconds to wait for other machines, at least.
        place: of the store, for messages.
        on_restored: called on a connection to the new store, by the machine that has republished the journal,
            before it counts.
    """

    def __init__(
        self,
        copy: JournalCopy,
        kept: KeptKeys,
        roster: Callable[[], Roster | None],
        *,
        gather_s: float,
        place: str,
        on_restored: Callable[[Store], None] = lambda _: None,
    ) -> None:
        self._copy = copy
        self._kept = kept
        self._roster = roster
        self._gather_s = max(gather_s, _LEAST_GATHER_S)
        self._place = place
        self._on_restored = on_restored
        self._lock = threading.Lock()
        self._known = ""  # the incarnation; guarded by the lock

    def admit(self, store: Store) -> bool:
        """Whether a store is the run's. Where it is empty, it is restored first.

        Raises:
            FencedError: less of the journal was republished than this machine has read.
            NotRestoredError: the store cannot get back all that the run needs.
            torch.distributed.DistError: the store was lost meanwhile.
        """
        with self._lock:
            incarnation = incarnation_of(store)
            if incarnation and incarnation == self._known:
                self._copy.unseal()
                return True
            roster = self._roster()
            if not self._known or roster is None:  # this agent has read nothing yet
                self._known = incarnation
                return bool(incarnation)
            own = self._copy.seal()
            if not incarnation:
                with waiting("the other machines that republish the journal in the new rendezvous store"):
                    incarnation = self._restore(store, roster, own)
            if not incarnation:
                return False
            if own > (end := republished_to(store, incarnation)):
                error = FencedError(
                    f"The rendezvous store at {self._place} was started anew, and the journal republished up "
                    f"to block {end}, while this machine was silent. It has read up to block {own}, so its "
                    "state is not that of the others: it ends, and can be replaced."
                )
                self._copy.refuse(error)
                raise error
            self._kept.put_back(store)  # where this machine came after the others
            self._kept.put_back_others(store)
            self._known = incarnation
            self._copy.unseal()
            return True

    def _restore(self, store: Store, roster: Roster, own: int) -> str:
        """The new incarnation; empty if none is set."""
        self._kept.put_back(store)
        for machine in roster.lost:
            store.set(store_keys.restore_lost(machine), "1")
        store.set(store_keys.restore_offer(roster.own), str(own))
        deadline = time.monotonic() + self._gather_s
        others = {*roster.members, *roster.spares} - {roster.own}
        look_s = _LOOK_S + len(others) * _LOOK_EACH_S
        while missing := self._missing(store, others):
            if time.monotonic() > deadline or store.check([store_keys.incarnation()]):
                break
            _wait(store, [store_keys.restore_offer(machine) for machine in missing], look_s)
        self._kept.put_back_others(store)
        while not (found := incarnation_of(store)):
            if (furthest := self._furthest(store, roster.own, own, others)) == roster.own:
                return self._publish(store, roster, own)
            _wait(store, [store_keys.incarnation()], _PUBLISH_S)
            others.discard(furthest)
        return found

    def _publish(self, store: Store, roster: Roster, own: int) -> str:
        deadline = time.monotonic() + _KEYS_S
        while gone := self._without_keys(store, roster):
            if time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                continue
            self._give_up(store, gone)
            return incarnation_of(store)
        new = new_incarnation()
        self._copy.publish(store, new)
        self._on_restored(store)
        found = store.compare_set(store_keys.incarnation(), "", new).decode()
        if found == new:
            _logger.warning(
                "the rendezvous store at %s was started anew, empty: this machine has republished the "
                "journal (%d blocks), and all go on",
                self._place,
                own,
                extra={"event": "store_restored"},
            )
        return found

    def _without_keys(self, store: Store, roster: Roster) -> list[str]:
        """Machines whose keys neither they nor others have set again."""
        needed = {*roster.members, *roster.fenced} - {roster.own}
        return KeptKeys.missing(store, self._silent(store, needed))

    def _give_up(self, store: Store, gone: list[str]) -> None:
        reason = (
            f"The rendezvous store at {self._place} was started anew, and what machine {min(gone)} had set "
            "there is lost, since the machine that held a copy was lost, too: start the run again with "
            "--resume."
        )
        text = NOT_RESTORED + reason
        if store.compare_set(store_keys.incarnation(), "", text).decode() == text:
            _logger.error("%s", reason, extra={"event": "store_not_restored"})

    def _missing(self, store: Store, others: Collection[str]) -> list[str]:
        silent = self._silent(store, others)
        return absent(store, {machine: store_keys.restore_lost(machine) for machine in silent})

    @staticmethod
    def _silent(store: Store, machines: Collection[str]) -> list[str]:
        return absent(store, {machine: store_keys.restore_offer(machine) for machine in machines})

    def _furthest(self, store: Store, own: str, position: int, others: Collection[str]) -> str:
        offers = [
            (int(store.get(store_keys.restore_offer(machine))), machine)
            for machine in others
            if store.check([store_keys.restore_offer(machine)])
        ]
        return max([*offers, (position, own)])[1]


def _wait(store: Store, keys: list[str], limit_s: float) -> None:
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except DistStoreError:
        return  # they are not there in time
