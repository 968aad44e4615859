"""Control planes of one process share what they would all compute alike. A benchmark of many needs it.

On a cluster each machine has a processor of its own for this. Here hundreds have a part of one. Decoding a
block, giving its events positions, and applying them are pure functions, and all participants of a job call
them with the same arguments. So the first one of a process computes, and the others take its result: the very
objects, which none of them changes. Everything else is done by each participant itself: sockets, threads,
locks, waits, orders.

What one participant costs without this is measured in processes that do not share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from swift_ft.config import detection_timings as timings
from swift_ft.coordination import follower, journal, journal_reader
from swift_ft.coordination.relay import merging, relay, worker_journal
from swift_ft.coordination.relay.upstream import Upstream
from swift_ft.recovery.blocks import Block, Sequencer, block_from_text
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import State

_KEPT = 65_536
_LINGER_S = 1.0


class _Memo:
    """The newest results of a function, by its arguments or by their identity, which are kept alive."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._known: OrderedDict[Hashable, tuple[Any, tuple[Any, ...]]] = OrderedDict()

    def __call__(self, key: Hashable, *args: Any) -> Any:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._function(*args), args
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found[0]


def be_patient(silence_s: float) -> None:
    """Let relays wait so long for each other before they take another way, and say less often that they live.

    Hundreds of machines take turns on a processor here. None of their relays fails, so what a failure would
    cost is not measured, but one that is only late must not count as one. So a relay holds the events of a
    phase until it has all of them, as it does where each machine has a processor: else the slower the host,
    the more blocks there are, each of which wakes all machines. And a second watcher waits for longer until
    it reports a loss, too.
    """
    for constructor in (Upstream.__init__, worker_journal.WorkerJournal.__init__):
        defaults: dict[str, Any] = constructor.__kwdefaults__ or {}
        defaults["silence_s"] = silence_s
    timings.EVENT_ALLOWED_S = silence_s
    merging.LINGER_S, merging.LONGEST_LINGER_S = _LINGER_S, silence_s / 12
    timings.END_STEP_S = _LINGER_S
    timings.RELAY_BEAT_S = timings.LONGEST_BEAT_S = silence_s / 12


def share() -> None:
    """From now on, all followers of this process share what they compute. Call it before the first one."""
    decoded, admitted, applied = _Memo(block_from_text), _Memo(_admit_all), _Memo(follower.after_entries)
    first_state, first_sequencer = State(), Sequencer()

    def decode(text: str | bytes) -> Block:
        block: Block = decoded(text, text)
        return block

    def admit(sequencer: Sequencer, block: Block) -> tuple[Sequencer, list[Entry]]:
        result: tuple[Sequencer, list[Entry]] = admitted((id(sequencer), id(block)), sequencer, block)
        return result

    def apply(state: State, entries: Sequence[Entry]) -> State:
        result: State = applied((id(state), id(entries)), state, entries)
        return result

    for module in (journal, relay, worker_journal):
        module.block_from_text = decode  # type: ignore[attr-defined]
    Sequencer.admit_all = admit  # type: ignore[method-assign, assignment]
    follower.after_entries = apply
    follower.State = lambda: first_state  # type: ignore[attr-defined, assignment, misc]
    for one in (follower, journal_reader):
        if hasattr(one, "Sequencer"):
            one.Sequencer = lambda: first_sequencer  # type: ignore[attr-defined]


_admit_all = Sequencer.admit_all
