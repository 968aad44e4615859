"""The events of a job as English sentences: one narrator for the console and the live view. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.recovery.protocol import step
from swift_ft.recovery.timeline import Recovery, Timeline, lost_statistics
from swift_ft.recovery.waits import named
from swift_ft.units import format_seconds

_OF_A_GUEST = (
    " (that worker was a guest's, beside the machine's own: two of them cannot have one port, lock or device)"
)


class Weight(IntEnum):
    """The importance of a sentence to a person who watches a run."""

    ROUTINE = 0
    """Happens in an undisturbed run, too, or is said elsewhere."""
    NEWS = 1
    """A loss, or what is done about it."""
    GRAVE = 2
    """Progress is lost, or the run ends."""


@dataclass(frozen=True, slots=True)
class News:
    """One sentence.

    Attributes:
        at: seconds since the run began.
        text: the sentence, without a full stop.
        weight: how much it matters.
    """

    at: float
    text: str
    weight: Weight = Weight.NEWS


class Narrator:
    """Follows the journal, entry by entry, and tells it.

    Attributes:
        state: the protocol's state.
        started_at: Unix time of the first entry; None before it.
        recoveries: all of them so far; the last one may not have ended.
    """

    def __init__(self) -> None:
        self.state = State()
        self.started_at: float | None = None
        self._timeline = Timeline()

    @property
    def recoveries(self) -> list[Recovery]:
        """All recoveries so far. The last one may not have ended."""
        return self._timeline.recoveries

    def begin(self, state: State) -> None:
        """Go on from a state: what led to it is not told."""
        self.state = state

    def apply(self, entry: Entry) -> list[News]:
        """Apply the next entry; returns the sentences for it, none for what a user need not know."""
        self.started_at = entry.at if self.started_at is None else self.started_at
        before, self.state = self.state, step(self.state, entry.event)
        ended = self._timeline.apply(before, self.state, entry)
        at = entry.at - self.started_at
        return [
            News(at, text, weight)
            for text, weight in _sentences(before, self.state, entry.event, ended)
            if text
        ]

    def summary(self) -> str:
        """All recoveries in one line; empty if there was none."""
        done = [recovery for recovery in self.recoveries if recovery.live is not None]
        if not self.recoveries:
            return ""
        seconds = sum(_duration(recovery) for recovery in done)
        lost = sum(max(recovery.iterations_lost.values(), default=0) for recovery in done)
        number = counted(len(done), "recovery", "recoveries")
        text = f"{number}, {format_seconds(seconds)}, {counted(lost, 'iteration')} lost"
        if unknown := sum(not recovery.iterations_lost for recovery in done):
            text += f" as far as it is known (in {unknown} of them no worker was left that could say it)"
        return text + ", and one that did not end" * (len(done) < len(self.recoveries))


def _sentences(
    before: State, after: State, event: ev.Event, ended: Recovery | None
) -> Iterator[tuple[str, Weight]]:
    yield _fact(before, after, event)
    if after.generation > before.generation:
        yield _generation_in_words(before, after, event)
    if after.plan is not None and before.plan is None:
        yield _plan_in_words(after)
        lost = lost_statistics(after.plan, after.round.statuses) if after.plan.tasks else {}
        for rank, source in sorted(lost.items()):
            text = f"worker {rank} loses its own running statistics and goes on with those of worker {source}"
            yield text, Weight.GRAVE
    if after.phase == Phase.LIVE and before.phase != Phase.LIVE and after.plan is not None:
        text = f"all are live, and go on with iteration {after.plan.resume}"
        yield (text, Weight.ROUTINE) if ended is None else (f"{text}: {_outcome(ended)}", Weight.NEWS)
    if after.verdict is not None and before.verdict is None:  # the launcher says it, as its last line
        ending = "the run is complete" if after.verdict.ok else f"the run ends: {after.verdict.reason}"
        yield ending, Weight.ROUTINE


def _fact(before: State, after: State, event: ev.Event) -> tuple[str, Weight]:
    match event:
        case ev.JobOpened() if not before.shape.machines:  # each machine opens the job that finds none
            workers = counted(event.workers_per_machine, "worker")
            return f"a run on {counted(event.machines, 'machine')}, {workers} on each", Weight.ROUTINE
        case ev.MachineJoined() if event.host:
            return f"a guest of {machine_in_words(after, event.host)} is ready", Weight.ROUTINE
        case ev.GuestDeclined():
            text = f"{machine_in_words(after, event.machine)} cannot run an empty slot, too: {event.reason}"
            return text, Weight.NEWS
        case ev.MachineJoined() if after.slot_of(event.machine) is None and before.generation:
            return "a spare machine joins", Weight.ROUTINE
        case ev.FaultInjected():
            return f"fault: {event.fault}", Weight.NEWS
        case ev.DrainRequested() if event.machine in after.membership.draining:
            text = f"{machine_in_words(after, event.machine)} is asked to leave by {event.asked_by}"
            return text, Weight.NEWS
        case ev.MachineLost(on_request=True) if event.machine not in before.membership.fenced:
            return f"{machine_in_words(before, event.machine)} leaves: {event.reason}", Weight.NEWS
        case ev.MachineLost() if (slot := before.slot_of(event.machine)) is not None:
            return f"machine {slot} is lost: {event.reason}", Weight.NEWS
        case ev.MachineLost():
            return f"a spare machine is lost: {event.reason}", Weight.NEWS
        case ev.CheckpointDamaged():
            return f"worker {event.rank}: {event.reason}", Weight.GRAVE
        case ev.ReplayFailed() if len(after.membership.refused) > len(before.membership.refused):
            slot = before.slot_of_rank(event.rank)
            reason = after.membership.refused[str(before.members[slot])]
            return f"machine {slot} is refused, and the next one takes its slot: {reason}", Weight.NEWS
        case ev.CommunicationFailed() | ev.ReplayFailed() | ev.HelpDeclined() | ev.LayoutDeclined():
            return f"worker {event.rank}: {event.reason}", Weight.NEWS
        case ev.ScriptFailed() if after.phase != Phase.ENDED:
            guest = event.machine in before.membership.hosts
            return f"{event.reason}{_OF_A_GUEST if guest else ''}", Weight.NEWS
        case ev.DeadlinePassed() if after.phase != Phase.ENDED:
            return event.reason, Weight.NEWS
        case ev.WorkerReady() if event.replayed:
            return f"worker {event.rank} has replayed {counted(event.replayed, 'iteration')}", Weight.NEWS
        case ev.PaceNoted() if after != before:
            return pace_in_words(event), Weight.NEWS
        case ev.CheckpointCommitted():
            return f"the checkpoint of iteration {event.iteration} is committed", Weight.ROUTINE
        case ev.CheckpointRequested() if after.checkpoints.requested != before.checkpoints.requested:
            text = f"worker {event.rank} asks for a checkpoint of iteration {event.iteration}: {event.reason}"
            return text, Weight.ROUTINE
        case ev.WorkerFinished() if after.all_finished:
            return "all workers have completed the last iteration", Weight.ROUTINE
    return "", Weight.ROUTINE


def pace_in_words(event: ev.PaceNoted) -> str:
    """``worker 2 takes 2.9 times as long as its peers for its own work``."""
    if event.permille <= 1000:
        return f"worker {event.rank} is as fast as its peers again"
    times = event.permille / 1000
    return f"worker {event.rank} takes {times:.1f} times as long as its peers would for its own work"


def shares_in_words(state: State) -> str:
    """``replicas get 10, 22 samples of each batch, from iteration 40 on``. There is such a change."""
    since, samples = state.layouts.shares[-1]
    return f"replicas get {', '.join(map(str, samples))} samples of each batch, from iteration {since} on"


def machine_in_words(state: State, machine: str) -> str:
    """``machine 3`` for a member, ``a spare machine`` for any other."""
    slot = state.slot_of(machine)
    return "a spare machine" if slot is None else f"machine {slot}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 machine``, ``2 machines``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def _outcome(recovery: Recovery) -> str:
    """The duration of a recovery, and its cost."""
    lost: dict[int, list[int]] = {}
    for rank, count in sorted(recovery.iterations_lost.items()):
        if count:
            lost.setdefault(count, []).append(rank)
    losses = [f"{named('worker', ranks)} lost {counted(n, 'iteration')}" for n, ranks in sorted(lost.items())]
    cost = "; ".join(losses) or "no completed iteration is lost"
    if not recovery.iterations_lost:
        cost = "no worker is left that could say how many iterations are lost"
    return f"back after {format_seconds(_duration(recovery))}; {cost}"


def _duration(recovery: Recovery) -> float:
    return (recovery.live or recovery.detected) - recovery.detected


def _generation_in_words(before: State, after: State, event: ev.Event) -> tuple[str, Weight]:
    if before.generation == 0:
        return "all machines are here", Weight.ROUTINE
    if set(after.membership.started_in.values()) == {after.generation}:
        return (
            f"generation {after.generation}: all processes start again{_from_where(after)}"
            f"{_why_restart(after, event)}",
            Weight.GRAVE,
        )
    known = before.membership.slots
    filled = {slot: member for slot, member in enumerate(after.members) if member not in known}
    hosts = {slot: after.membership.hosts.get(str(member)) for slot, member in filled.items()}
    who = " and ".join(f"machine {slot}" for slot, host in hosts.items() if host is None)
    what = [f"a replacement for {who}"] if who else []
    what += [
        f"{machine_in_words(after, host)} runs the workers of machine {slot}, too"
        for slot, host in hosts.items()
        if host is not None
    ]
    if after.layouts.pending is not None:
        return f"generation {after.generation}: all stop, since layers move", Weight.ROUTINE
    if after.layouts.shares != before.layouts.shares:
        return f"generation {after.generation}: {shares_in_words(after)}", Weight.NEWS
    return f"generation {after.generation}: {', '.join(what) or 'all meet again'}", Weight.NEWS


def _from_where(state: State) -> str:
    """What the processes begin with."""
    committed = state.checkpoints.committed
    if committed is None or not state.has_sessions:
        return ""
    return f" from the checkpoint of iteration {committed}"


def _why_restart(state: State, event: ev.Event) -> str:
    """The reason, and what the script did that made it necessary."""
    if isinstance(event, ev.SessionlessWorkers):
        return (
            ": no worker had created a swift_ft.Session. If the script has one, create it before all that "
            "takes long; without one, a loss costs all that the script's own checkpoints lack"
        )
    return f": {state.tries.fallback_reason}" if state.tries.fallback_reason else ""


def _plan_in_words(state: State) -> tuple[str, Weight]:
    plan = state.plan
    assert plan is not None
    again = Weight.NEWS if state.generation > 1 else Weight.ROUTINE
    match plan.mode:
        case RecoveryMode.START:
            source = f" from the checkpoint of iteration {plan.resume}" * bool(plan.resume)
            return f"all workers start{source}", again
        case RecoveryMode.CONTINUE:
            return f"all workers have their state and continue with iteration {plan.resume}", again
        case RecoveryMode.LAYOUT:
            layers = ", ".join(map(str, plan.new_layout or ()))
            return f"layers move after iteration {plan.resume - 1}: {layers} on the stages", Weight.NEWS
        case RecoveryMode.REPLAY:
            who = ", ".join(
                f"worker {rank} replays iterations {task.begin} to {task.replay_until - 1}"
                for rank, task in sorted(plan.tasks.items())
                if task.begin < task.replay_until
            )
            together = " jointly" * any(task.replay_group for task in plan.tasks.values())
            helpers = sorted(rank for replay in plan.parallel_replays for rank in replay.helpers)
            helped = f", helped by {', '.join(f'worker {rank}' for rank in helpers)}" if helpers else ""
            return (
                f"survivors keep their state; {who or 'nothing is to be replayed'}{together}{helped}",
                again,
            )
        case RecoveryMode.REPLICA:
            targets = sorted({rank for transfer in plan.transfers for rank in transfer.targets})
            who = ", ".join(f"worker {rank}" for rank in targets) or "no worker"
            return f"{who} becomes equal to a replica; all go on with iteration {plan.resume}", again
        case RecoveryMode.MEMORY:
            text = f"all workers return to iteration {plan.resume}, which is in memory: {plan.reason}"
            return text, again
    text = f"all workers return to the checkpoint of iteration {plan.resume}: {plan.reason}"
    return text, Weight.GRAVE
