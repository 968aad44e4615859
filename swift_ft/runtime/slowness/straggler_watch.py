"""Worker 0 looks out for workers that are persistently slower than their peers, in a thread of its own.

Each worker publishes how long it takes for its own work, with its progress. What that is compared with is the
cost of its layers where they can move, else what replicas of it take for their shares of a batch, else the
least that it took itself. A device that several workers share is not judged.

Each worker also publishes what its busiest link has done. A slow one is named, and nothing moves for it: the
layers would send their messages over it all the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from swift_ft.coordination.participant import Participant
from swift_ft.coordination.progress import ProgressBoard
from swift_ft.costs.job import Worker
from swift_ft.costs.slow_links import LinkSample, SlowLinks
from swift_ft.costs.stragglers import Sample, Stragglers, least_of_peers
from swift_ft.recovery import events as ev
from swift_ft.recovery.devices import device_of, pace_of, shared_devices
from swift_ft.recovery.job_state import Phase, State
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.elastic.layer_profiler import LayerCosts
from swift_ft.units import format_bytes

_SLOW_S = 1.0
"""Longer than the rest of a recovery without its replay."""


def say_if_slow(took_s: float, rank: int) -> None:
    """Log a line if a script took long before its session, in a worker that a recovery has started.

    Args:
        took_s: seconds; 0 in another worker.
        rank: the worker.
    """
    if took_s >= _SLOW_S:
        _logger.info(
            "worker %d: the script took %.1f s before its session, and all others waited for it: if that was "
            "for its imports, name them with swift-run --preload",
            rank,
            took_s,
            extra={"event": "script_began_slowly", "rank": rank},
        )


_logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_OF_OTHER_SHARES = 8
"""Iterations after a change of shares in which a worker may still say what it took before."""
_PER_WORKER_S = 0.002
"""Of the interval, so that large jobs are looked at less often."""


class StragglerWatch:
    """Judges all workers.

    Args:
        participant: worker 0's part in the job.
        progress: what all workers publish.
        workers: reads what the workers have measured in their first iterations; None until all have.
        costs: of the layers of a LayerStack; None for any other model.
        dealt: the batches that replicas share.
    """

    def __init__(
        self,
        participant: Participant,
        progress: ProgressBoard,
        workers: Callable[[], Sequence[Worker] | None],
        costs: LayerCosts | None,
        dealt: DealtBatches,
    ) -> None:
        self._participant = participant
        self._progress = progress
        self._config = config = participant.context.config
        self._stragglers = Stragglers(config.straggler_factor)
        self._links = SlowLinks()
        self._workers = workers
        self._costs = costs
        self._dealt = dealt
        self._least: dict[int, float] = {}  # by rank, of its own work, with the share of the beginning
        self._holds: dict[int, tuple[str, ...]] = {}
        self._generation = 0
        self._closed = threading.Event()

    def start(self, *, rebalances: bool) -> None:
        """Begin to look.

        Args:
            rebalances: layers, or shares of batches, can be taken from slow workers.
        """
        if self._config.stragglers == "rebalance" and not rebalances:
            _logger.warning(
                "--stragglers rebalance has no effect: what can move are the layers of a LayerStack, and the "
                "shares of GlobalBatches that are a part of Session(state). Slow workers are named.",
                extra={"event": "stragglers_stay"},
            )
        threading.Thread(target=self._run, name="swift-straggler-watch", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _run(self) -> None:
        interval_s = _LOOK_S + _PER_WORKER_S * self._participant.context.world_size
        while not self._closed.wait(interval_s):
            try:
                self._look(self._participant.state)
            except Exception as error:  # the rendezvous store is lost: the journal's thread says so
                _logger.debug("no further look for stragglers: %s", error)
                return

    def _look(self, state: State) -> None:
        if state.phase != Phase.LIVE or state.round.finished or state.world_size < 2:
            return
        if state.generation != self._generation:
            self._generation = state.generation
            self._stragglers.forget()
        published = self._progress.read_all(state.shape.machines)
        told = {rank: said for rank, said in published.items() if said["mode"] == "live"}
        self._look_at_links(told)
        samples = {
            rank: Sample(said["iteration"], said["own_s"], said["step_s"])
            for rank, said in told.items()
            if said.get("own_s") is not None
        }
        if (expected_s := self._expected_s(state, samples)) is None:
            return
        shared = shared_devices(state)
        expected_s = {r: s for r, s in expected_s.items() if device_of(state, r) not in shared}
        slow = {rank: pace_of(state, rank) for rank in expected_s}
        for rank, permille in self._stragglers.judge(samples, expected_s, slow, time.monotonic()).items():
            state = self._participant.append(
                ev.PaceNoted(
                    rank=rank,
                    generation=self._generation,
                    iteration=samples[rank].iteration,
                    permille=permille,
                )
            )
        if self._config.stragglers == "replace":
            self._replace(state)

    def _look_at_links(self, told: Mapping[int, Any]) -> None:
        """Say which links have become slow, and which are so no more."""
        samples = {rank: LinkSample(**said["link"]) for rank, said in told.items() if said.get("link")}
        before = dict(self._links.slow)
        for rank, is_slow in self._links.judge(samples).items():
            if is_slow:
                sample = samples[rank]
                _logger.warning(
                    "The link from worker %d to %s is slow: %s/s, a third of what others' links do or less. "
                    "Bytes are on their way there in %.0f %% of the time.",
                    rank,
                    sample.peer,
                    format_bytes(sample.bytes_per_s),
                    100 * sample.busy,
                    extra={"event": "slow_link", "rank": rank, "peer": sample.peer},
                )
            else:
                _logger.info(
                    "The link from worker %d to %s is as fast as others again.",
                    rank,
                    before[rank],
                    extra={"event": "link_is_fast_again", "rank": rank, "peer": before[rank]},
                )

    def _expected_s(self, state: State, samples: Mapping[int, Sample]) -> Mapping[int, float] | None:
        """The time of each worker's work on equal devices, by rank. Only the proportions count."""
        if self._costs is not None:
            if (layers := self._costs.read(state)) is None:
                return None
            placed = state.layouts.placed
            return {rank: sum(layers[n].compute_ns for n in own) / 1e9 for rank, own in placed.items()}
        if not self._least and (workers := self._workers()) is not None:
            self._holds = {rank: worker.holds for rank, worker in enumerate(workers)}
            self._least = {rank: worker.measured.compute_s or 0.0 for rank, worker in enumerate(workers)}
        if not self._least:
            return None
        shares = _shares_of(self._least, self._dealt.shares, state)
        changed = state.layouts.shares[-1].since if state.layouts.shares else -_OF_OTHER_SHARES
        for rank, sample in samples.items():  # the first iterations may have been disturbed
            if sample.own_s > 0 and sample.iteration >= changed + _OF_OTHER_SHARES:
                self._least[rank] = min(self._least[rank], sample.own_s / shares[rank])
        return {rank: s * shares[rank] for rank, s in least_of_peers(self._least, self._holds).items()}

    def _replace(self, state: State) -> None:
        """Ask the slowest machine to hand over, if a spare waits and no other machine is leaving."""
        membership = state.membership
        spares = [spare for spare in membership.spares if spare not in membership.hosts]
        slow = {device.rpartition("/")[0]: pace for device, pace in sorted(membership.pace.items())}
        if not spares or not slow or membership.draining:
            return
        machine = max(slow, key=lambda name: slow[name])
        self._participant.append(ev.DrainRequested(machine=machine, asked_by="--stragglers replace"))


def _shares_of(ranks: Iterable[int], first: Sequence[int], state: State) -> dict[int, float]:
    """The samples of each replica in a batch now, as a multiple of those at the beginning."""
    if not state.layouts.shares or len(first) != state.world_size:
        return dict.fromkeys(ranks, 1.0)
    now = state.layouts.shares[-1].samples
    return {rank: now[rank] / first[rank] for rank in ranks}
