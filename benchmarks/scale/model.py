"""A model of a job's control plane: what a recovery and a checkpoint cost, by discrete events. Pure.

It has what decides how the cost grows: the store, which serves one operation after the other; the tree of
relays, which merge on the way up and push on the way down; and the processor time of each participant. What
one step of each costs was measured (`calibrate.py`). Positions in the journal, the tree and the rules of
merging are the project's own.

    loss ──▶ seen ──▶ up, into the store, down ──▶ all report ──▶ up, store, down ──▶ plan
         ──▶ the newcomer is ready ──▶ up, store, down ──▶ all are live
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from swift_ft.recovery.orders import WATCHED_EACH


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one step takes. Seconds of a processor, unless said otherwise.

    Attributes:
        store_op_s: the store's, for one operation.
        round_trip_s: wall, from a request to the store's answer, without its own time.
        store_op_cpu_s: the client's, for one operation.
        hop_s: wall, of one message from one relay to the next, without what both compute.
        send_s: to push one message to one that follows.
        receive_s: to receive one.
        per_byte_s: for each byte of a message that is sent or received.
        decode_s: to decode one event of a block.
        encode_s: to encode one.
        apply_s: to apply one.
        plan_s: for each worker of the job, to make the plan once all have reported.
        wake_s: to wake all threads of a participant that a block concerns; as much for an event that goes up.
        event_bytes: of an event in a block of many.
        block_bytes: of a block, without its events.
        seen_s: wall, from the loss until another machine has noticed it.
        report_s: wall, from the order to report until a survivor has done so, without the journal; the least
            and the most.
        start_s: wall, from the order to start the newcomer's workers until its session reports.
        snapshot_s: for each machine of the job, to read the snapshot with which a newcomer begins.
        linger_s: how long a relay holds events of a phase that is not complete, after the newest came.
        longest_linger_s: how long it holds them at most.
        parts_linger_s: the same for parts of a checkpoint.
    """

    store_op_s: float
    round_trip_s: float
    store_op_cpu_s: float
    hop_s: float
    send_s: float
    receive_s: float
    per_byte_s: float
    decode_s: float
    encode_s: float
    apply_s: float
    plan_s: float
    wake_s: float
    event_bytes: float = 40.0
    block_bytes: float = 400.0
    seen_s: float = 0.005
    report_s: tuple[float, float] = (0.0, 0.0)
    start_s: float = 0.0
    snapshot_s: float = 0.0
    linger_s: float = 0.1
    longest_linger_s: float = 0.4
    parts_linger_s: float = 0.5


@dataclass(frozen=True)
class Tree:
    """Which machine goes to which head.

    Attributes:
        parents: of each machine; None for one that goes to the store.
        served: by machine, how many machines' events come through it, its own included.
    """

    parents: tuple[int | None, ...]
    served: tuple[int, ...]

    @classmethod
    def of(cls, parents: tuple[int | None, ...]) -> Tree:
        """The tree with these edges. A parent comes before its children."""
        served = [1] * len(parents)
        for machine in range(len(parents) - 1, -1, -1):
            if (parent := parents[machine]) is not None:
                served[parent] += served[machine]
        return cls(parents, tuple(served))

    def children(self) -> list[list[int]]:
        """By machine, those that go to it."""
        found: list[list[int]] = [[] for _ in self.parents]
        for machine, parent in enumerate(self.parents):
            if parent is not None:
                found[parent].append(machine)
        return found


@dataclass
class Outcome:
    """What the model has seen.

    Attributes:
        wall_s: from the beginning to the last order.
        operations: that the store was asked.
        bytes: that it took and gave.
        store_s: its own processor time.
        cpu_s: of all participants together.
        most_cpu_s: of the participant that computed most: a head.
        blocks: that were written.
        phases: when the last participant had reached each phase.
    """

    wall_s: float = 0.0
    operations: int = 0
    bytes: float = 0.0
    store_s: float = 0.0
    cpu_s: float = 0.0
    most_cpu_s: float = 0.0
    blocks: int = 0
    phases: dict[str, float] = field(default_factory=dict)


@dataclass
class _Relay:
    """What a machine's relay holds, by kind of event."""

    held: int = 0
    told: int = 0
    latest: float = math.inf
    due_at: float = math.inf


@dataclass(frozen=True)
class _Block:
    events: int
    opens: str = ""


class _Job:
    """The machines, the store, and the time.

    Args:
        tree: of the relays.
        costs: of each step.
        cores: that all participants share; None if each participant has one of its own.
    """

    def __init__(self, tree: Tree, costs: Costs, cores: int | None) -> None:
        self.tree, self.costs = tree, costs
        self.children = tree.children()
        self.outcome = Outcome()
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._pool = [0.0] * cores if cores is not None else None
        self._free: dict[tuple[str, int], float] = {}
        self._used: dict[tuple[str, int], float] = {}
        self._store_free = 0.0
        self.journal: list[_Block] = []
        self.expected = {"report": len(tree.parents), "part": len(tree.parents), "ready": 1, "lost": 0}
        self.counted = dict.fromkeys(self.expected, 0)
        self._relays: dict[tuple[str, int], _Relay] = {}
        self._readers: dict[int, int] = {}  # heads that wait at the store, and for which block
        self.on_block: Callable[[int, str, _Block], None] = lambda machine, who, block: None

    # ------------------------------------------------------------------------------------------ the time

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), what))

    def run(self) -> None:
        while self._queue:
            self.now, _, what = heapq.heappop(self._queue)
            what()

    def compute(self, who: str, machine: int, cpu_s: float) -> float:
        """Let a participant compute from now on. Returns when it is done."""
        key = (who, machine)
        if self._pool is not None:
            done = max(heapq.heappop(self._pool), self.now) + cpu_s
            heapq.heappush(self._pool, done)
        else:
            done = max(self._free.get(key, 0.0), self.now) + cpu_s
            self._free[key] = done
        self._used[key] = self._used.get(key, 0.0) + cpu_s
        return done

    def finish(self) -> Outcome:
        self.outcome.cpu_s = sum(self._used.values())
        self.outcome.most_cpu_s = max(self._used.values(), default=0.0)
        self.outcome.blocks = len(self.journal)
        return self.outcome

    # ----------------------------------------------------------------------------------------- the store

    def ask(self, when: float, nbytes: float, answered: Callable[[], None]) -> None:
        """One operation of the store, which serves one after the other."""

        def arrive() -> None:
            costs, outcome = self.costs, self.outcome
            took = costs.store_op_s + nbytes * costs.per_byte_s / 10
            if self._pool is not None:  # it is a process of the same host
                done = max(heapq.heappop(self._pool), self.now) + took
                heapq.heappush(self._pool, done)
            else:
                done = max(self._store_free, self.now) + took
                self._store_free = done
            outcome.operations += 1
            outcome.bytes += nbytes
            outcome.store_s += took
            self.at(done, served)

        def served() -> None:
            answered()

        self.at(when + self.costs.round_trip_s / 2, arrive)

    def append(self, machine: int, kind: str, events: int, position: int) -> None:
        """Write a block at the first free position: by trying, as the embedded store has it."""
        costs = self.costs
        nbytes = costs.block_bytes + events * costs.event_bytes

        def tried() -> None:
            if position < len(self.journal):  # another one was faster
                self.at(
                    self.now + costs.round_trip_s / 2,
                    lambda: self.append(machine, kind, events, position + 1),
                )
                return
            self._write(kind, events)

        cpu = costs.store_op_cpu_s * 2
        self.ask(self.compute("agent", machine, cpu), nbytes, tried)
        self.ask(self.now, 8, lambda: None)  # which blocks were deleted

    def _write(self, kind: str, events: int) -> None:
        before = self.counted[kind]
        self.counted[kind] = before + events
        complete = before < self.expected[kind] <= before + events
        self.journal.append(_Block(events, kind if complete or kind == "lost" else ""))
        number = len(self.journal) - 1
        for machine, wanted in list(self._readers.items()):
            if wanted == number:
                self._fetch(machine, number)

    def read(self, machine: int, number: int) -> None:
        """A head waits at the store for a block."""
        self._readers[machine] = number
        if number < len(self.journal):
            self._fetch(machine, number)

    def _fetch(self, machine: int, number: int) -> None:
        del self._readers[machine]
        block = self.journal[number]
        nbytes = self.costs.block_bytes + block.events * self.costs.event_bytes

        def answered() -> None:
            self.at(self.now + self.costs.round_trip_s / 2, lambda: self._came(machine, number))

        self.ask(self.now, nbytes, answered)

    def _came(self, machine: int, number: int) -> None:
        self.push(machine, number, self.costs.store_op_cpu_s)
        self.read(machine, number + 1)

    # --------------------------------------------------------------------------------------- the relays

    def push(self, machine: int, number: int, cost_s: float) -> None:
        """A block came to an agent: pass it on to those that follow, then apply it."""
        costs, block = self.costs, self.journal[number]
        nbytes = costs.block_bytes + block.events * costs.event_bytes
        for child in self.children[machine]:
            sent = self.compute("agent", machine, costs.send_s + nbytes * costs.per_byte_s)
            self.at(sent + costs.hop_s, lambda child=child: self.push(child, number, costs.receive_s))  # type: ignore[misc]
        sent = self.compute("agent", machine, costs.send_s + cost_s + nbytes * costs.per_byte_s)
        self.at(sent + costs.hop_s, lambda: self._apply(machine, "worker", block, costs.receive_s))
        self._apply(machine, "agent", block, 0.0)

    def _apply(self, machine: int, who: str, block: _Block, cost_s: float) -> None:
        costs = self.costs
        cpu = cost_s + block.events * (costs.decode_s + costs.apply_s) + costs.wake_s
        if block.opens == "report":
            cpu += costs.plan_s * len(self.tree.parents)
        done = self.compute(who, machine, cpu)
        self.at(done, lambda: self.on_block(machine, who, block))

    def post(self, machine: int, kind: str, events: int = 1, *, told: int = 1) -> None:
        """Events reach a machine's relay, from its worker or from below."""
        costs = self.costs
        relay = self._relays.setdefault((kind, machine), _Relay())
        relay.held += events
        relay.told += told
        if kind in ("lost", "ready") or relay.told >= self.tree.served[machine]:
            self._pass_on(machine, kind)
            return
        linger_s, longest_s = costs.linger_s, costs.longest_linger_s
        if kind == "part":
            linger_s = longest_s = costs.parts_linger_s
        relay.latest = min(relay.latest, self.now + longest_s)
        relay.due_at = min(relay.latest, self.now + linger_s)
        self.at(relay.due_at, lambda: self._pass_on(machine, kind) if self.now >= relay.due_at else None)

    def _pass_on(self, machine: int, kind: str) -> None:
        costs, relay = self.costs, self._relays[kind, machine]
        events, relay.held, relay.latest, relay.due_at = relay.held, 0, math.inf, math.inf
        if not events:
            return
        nbytes = costs.block_bytes + events * costs.event_bytes
        cpu = costs.encode_s * events + costs.send_s + nbytes * costs.per_byte_s
        done = self.compute("agent", machine, cpu)
        parent = self.tree.parents[machine]
        if parent is None:
            self.at(done, lambda: self.append(machine, kind, events, len(self.journal)))
            return

        def arrive() -> None:
            cpu = costs.receive_s + costs.wake_s + events * costs.decode_s
            received = self.compute("agent", parent, cpu)
            self.at(received, lambda: self.post(parent, kind, events, told=events))

        self.at(done + costs.hop_s, arrive)


def recovery(
    tree: Tree, costs: Costs, *, cores: int | None = None, lost: int | None = None, seed: int = 0
) -> Outcome:
    """A machine is lost, a spare takes its slot, and all go live again; nothing is replayed.

    Args:
        tree: of the relays.
        costs: of each step.
        cores: that all participants and the store share; None if each has one of its own.
        lost: the slot; an ordinary one by default.
        seed: of how long survivors take to report.
    """
    job, rng, machines = _Job(tree, costs, cores), random.Random(seed), len(tree.parents)
    lost = machines // 2 + 3 if lost is None else lost
    last: dict[tuple[str, str], float] = {}
    told: set[tuple[str, int]] = set()

    def report(machine: int, kind: str = "report") -> None:
        sent = job.compute("worker", machine, costs.send_s + costs.encode_s)
        taken = job.compute("agent", machine, costs.receive_s + costs.wake_s + costs.decode_s)
        job.at(max(sent, taken) + costs.hop_s, lambda: job.post(machine, kind))

    def on_block(machine: int, who: str, block: _Block) -> None:
        if not block.opens:
            return
        last[block.opens, who] = job.now
        if who != "worker":
            return
        if block.opens == "lost" and ("lost", machine) not in told:
            told.add(("lost", machine))
            wait_s = rng.uniform(*costs.report_s)
            if machine == lost:
                wait_s = costs.start_s + job.compute("worker", machine, costs.snapshot_s * machines) - job.now
            job.at(job.now + wait_s, lambda: report(machine))
        if block.opens == "report" and machine == lost:
            report(machine, "ready")

    job.on_block = on_block
    for machine, parent in enumerate(tree.parents):
        if parent is None:
            job.read(machine, 0)
    job.at(costs.seen_s, lambda: job.post((lost - 1) % machines, "lost"))
    # Its other watchers see it, too. What they say comes while the first block is written, and is one more.
    job.at(costs.seen_s, lambda: job.post((lost - 2) % machines, "lost", WATCHED_EACH - 1))
    job.run()
    outcome = job.finish()
    outcome.phases = {
        name: max(at for (opens, _), at in last.items() if opens == name)
        for name in ("lost", "report", "ready")
        if any(opens == name for opens, _ in last)
    }
    outcome.wall_s = outcome.phases["ready"]
    return outcome


def checkpoint(tree: Tree, costs: Costs, *, spread_s: float, seed: int = 0) -> Outcome:
    """All workers' parts of a checkpoint become durable, within a while.

    Args:
        tree: of the relays.
        costs: of each step.
        spread_s: from the first part to the last.
        seed: of the times.
    """
    job, rng = _Job(tree, costs, None), random.Random(seed)
    for machine, parent in enumerate(tree.parents):
        if parent is None:
            job.read(machine, 0)
        job.at(rng.uniform(0.0, spread_s), lambda machine=machine: job.post(machine, "part"))  # type: ignore[misc]
    last = [0.0]

    def on_block(machine: int, who: str, block: _Block) -> None:
        last[0] = job.now

    job.on_block = on_block
    job.run()
    outcome = job.finish()
    outcome.wall_s = last[0]
    return outcome
