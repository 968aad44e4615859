"""The faults of a simulated job, by name. A table of weights says how often each strikes."""

from __future__ import annotations

from collections.abc import Mapping

from swift_ft.recovery import events as ev
from swift_ft.recovery.guests import guests_wanted
from swift_ft.recovery.job_state import Phase
from swift_ft.testing.simulation.clock import Clock
from swift_ft.testing.simulation.cluster import Cluster
from swift_ft.testing.simulation.connection import Mode
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.store import Violation
from swift_ft.testing.simulation.worker import Worker

FAULTS = {
    "kill_machine": 8,
    "kill_two": 2,
    "kill_neighbours": 4,
    "kill_replicas": 0,
    "kill_all": 1,
    "kill_worker": 4,
    "freeze_machine": 5,
    "freeze_worker": 2,
    "false_alarm": 3,
    "drain": 3,
    "break_network": 5,
    "corrupt_log": 3,
    "lose_log": 3,
    "fail_loads": 2,
    "damage_checkpoint": 2,
    "diverge": 1,
    "break_update": 1,
    "pass_deadline_early": 4,
    "raise_in_script": 1,
    "leave_loop": 1,
    "offer_stranger": 1,
    "start_stranger": 1,
    "close_job": 1,
}
"""Weights by fault. The names are methods of :class:`Faults`."""

_NEED_SESSION = ("corrupt_log", "lose_log", "fail_loads", "damage_checkpoint", "diverge", "break_update")


class Faults:
    """The faults that can strike. Each is a method that returns False if it could not happen just now."""

    def __init__(self, cluster: Cluster, clock: Clock, weights: Mapping[str, int]) -> None:
        self._cluster, self._clock, self._rng = cluster, clock, cluster.rng
        self._kinds, self._weights = list(weights), list(weights.values())

    def strike(self) -> None:
        """One fault of a random kind."""
        cluster = self._cluster
        kind = self._rng.choices(self._kinds, self._weights)[0]
        if cluster.settings.sessionless and kind in _NEED_SESSION:
            return
        phase = cluster.states[-1].phase  # before the fault: some change it at once
        if getattr(self, kind)():
            cluster.fault_timing.budget -= 1
            cluster.excuses.struck = True
            cluster.seen[f"fault: {kind} while {phase}"] += 1
            cluster.note(kind)

    def _random_machine(self) -> Machine | None:
        up = [m for m in self._cluster.machines if m.alive and not m.frozen]
        state = self._cluster.states[-1]
        members = [m for m in up if m.name in state.members]
        awaited = [m for m in up if m.name in state.missing()]
        if awaited and self._rng.random() < 0.5:
            return self._rng.choice(awaited)  # while the others wait for it
        return self._rng.choice(members or up) if up else None

    def _random_worker(self) -> Worker | None:
        return self._rng.choice(self._cluster.workers) if self._cluster.workers else None

    # ------------------------------------------------------------------------------------------- deaths

    def kill_machine(self) -> bool:
        """A machine loses its power."""
        machine = self._random_machine()
        if machine is not None:
            machine.die()
        return machine is not None

    def kill_two(self) -> bool:
        """Two machines lose their power."""
        self.kill_machine()
        return self.kill_machine()

    def kill_neighbours(self) -> bool:
        """Machines with neighbouring slots lose their power at once."""
        members = self._cluster.states[-1].members
        number = min(self._rng.choice((2, 2, 3)), len(members) - 1)
        first = self._rng.randrange(len(members) - number + 1)
        lost = [m for m in self._cluster.machines if m.alive and m.name in members[first : first + number]]
        for machine in lost:
            machine.die()
        return bool(lost)

    def kill_replicas(self) -> bool:
        """All machines with a replica of some stage lose their power at once."""
        holders: dict[int, set[str]] = {w.stage: set() for w in self._cluster.workers}
        for worker in self._cluster.workers:
            holders[worker.stage].add(worker.machine.name)
        lost = holders[self._rng.choice(sorted(holders))] if holders else set()
        if not lost or len(lost) >= len(self._cluster.states[-1].members):
            return False
        for machine in self._cluster.machines:
            if machine.alive and machine.name in lost:
                machine.die()
        return True

    def kill_all(self) -> bool:
        """All machines lose their power."""
        if self._rng.random() > 0.2:
            return False
        for machine in self._cluster.machines:
            if machine.alive:
                machine.die()
        return True

    def kill_worker(self) -> bool:
        """A worker is killed by a signal."""
        worker = self._random_worker()
        if worker is not None:
            worker.exit(-9)
        return worker is not None

    # ------------------------------------------------------------------------- silence, and the network

    def freeze_machine(self) -> bool:
        """A machine freezes."""
        machine = self._random_machine()
        if machine is not None:
            self._clock.freeze(machine)
        return machine is not None

    def freeze_worker(self) -> bool:
        """A worker freezes."""
        worker = self._random_worker()
        if worker is not None:
            self._clock.freeze_worker(worker)
        self._cluster.membership_changed()
        return worker is not None

    def false_alarm(self) -> bool:
        """A healthy machine is declared lost: the network between two agents failed."""
        machine = self._random_machine()
        if machine is not None:
            self._cluster.append(ev.MachineLost(machine=machine.name, reason="false alarm"), "its watcher")
        return machine is not None

    def drain(self) -> bool:
        """An operator asks a machine to leave. Perhaps no other one comes, and a survivor takes a guest."""
        machine, cluster = self._random_machine(), self._cluster
        if machine is None:
            return False
        cluster.append(ev.DrainRequested(machine=machine.name, asked_by="an operator"), "an operator")
        for host, slots in guests_wanted(cluster.states[-1]).items() if self._rng.random() < 0.5 else ():
            if cluster.machine_named(host).alive:
                cluster.add_guest(cluster.machine_named(host), slots[0])
        return True

    def break_network(self) -> bool:
        """The connections of all groups fail."""
        groups = [w.group for w in self._cluster.workers if w.group is not None]
        for group in groups:
            group.broken = True
        return bool(groups)

    def pass_deadline_early(self) -> bool:
        """A deadline was too short."""
        waiting = [w for w in self._cluster.workers if w.mode == Mode.RECOVER and w.view.missing()]
        if waiting:
            self._clock.time_out(self._rng.choice(waiting))
        return bool(waiting)

    # --------------------------------------------------------------------------------- logs and state

    def corrupt_log(self) -> bool:
        """Parts of logs are torn, or their bits flip."""
        store = self._cluster.store
        entries = [(rank, i) for rank, log in store.logs.items() for i in log]
        if not entries:
            return False
        store.corrupt.update(self._rng.sample(entries, min(len(entries), self._rng.randint(1, 4))))
        return True

    def lose_log(self) -> bool:
        """A worker's disk was full for a while. It trains on, and knows since when its log is whole."""
        worker = self._random_worker()
        stepping = worker is not None and worker.mode in (Mode.RUN, Mode.REPLAY) and not worker.frozen
        return stepping and worker is not None and worker.lose_log()

    def fail_loads(self) -> bool:
        """The next checkpoints cannot be read."""
        number = self._rng.choice((1, 1, 2, 1_000_000))
        self._cluster.store.failing_loads += number
        return True

    def damage_checkpoint(self) -> bool:
        """Bits of a committed checkpoint flip. Somebody finds out when it is next loaded, perhaps at once."""
        store, rng = self._cluster.store, self._rng
        kept = self._cluster.states[-1].checkpoints.kept
        if not kept:
            return False
        rank, path = rng.choice(sorted(store.markers[rng.choice((kept[-1], kept[-1], *kept))].items()))
        store.damaged.add(path)
        self._cluster.excuses.damaged = True
        for machine in self._cluster.machines if rng.random() < 0.7 else ():
            if machine.alive and any(worker.rank == rank for worker in machine.workers):
                machine.die()
        return True

    def diverge(self) -> bool:
        """A live or replayed step finds that its result is wrong, or cannot write its log."""
        stepping = (Mode.RUN, Mode.REPLAY)
        worker = next((w for w in self._cluster.workers if w.mode in stepping and not w.frozen), None)
        if worker is None:
            return False
        worker.diverge()
        return True

    def break_update(self) -> bool:
        """Communication fails after the optimizer's step: the state is between two iterations."""
        return any(worker.break_half_updated() for worker in self._cluster.workers)

    # ------------------------------------------------------------------------------ scripts and users

    def raise_in_script(self) -> bool:
        """A worker's script raises an error of its own."""
        worker = self._random_worker()
        if worker is None:
            return False
        if worker.is_next:
            worker.exit(1)  # its world does not take over, and nothing else comes of it
            return True
        self._cluster.excuses.may_fail = True
        if self._rng.random() < 0.1:
            self._cluster.machine_named(worker.machine.name).usage_failure = True
        worker.exit(1)
        return True

    def leave_loop(self) -> bool:
        """One rank's script leaves the loop before the others."""
        worker = self._random_worker()
        if worker is None or worker.mode != Mode.RUN:
            return False
        self._cluster.excuses.may_fail = self._cluster.excuses.left_early = True
        worker.exit(0)
        return True

    def offer_stranger(self) -> bool:
        """Someone starts a machine with another script. It must never be used (`invariants.check_step`)."""
        if self._cluster.states[-1].phase == Phase.ENDED:
            return False
        name = f"stranger-{len(self._cluster.events)}"
        self._cluster.append(ev.MachineJoined(machine=name, setup=("script: another",)), name)
        if name not in self._cluster.states[-1].membership.refused:
            raise Violation(f"{name} was not refused")
        return True

    def start_stranger(self) -> bool:
        """A newcomer's workers find that they run another program. That costs its machine, never the job."""
        state = self._cluster.states[-1]
        new = [
            worker
            for worker in self._cluster.workers
            if worker.machine.name in state.members and worker.started_in > 1 and not state.membership.ended
            if not worker.is_next
        ]
        if not new:
            return False
        worker = self._rng.choice(new)
        self._cluster.machine_named(worker.machine.name).stranger = True
        worker.exit(1)
        return True

    def give_up_change_early(self) -> bool:
        """A deadline of a change to another world was too short."""
        stopped = [w for w in self._cluster.workers if w.mode == Mode.STOPPED and not w.frozen]
        agents = [m for m in self._cluster.machines if m.alive and not m.frozen]
        waiting: list[Machine | Worker] = [*stopped, *agents]
        self._rng.shuffle(waiting)
        return self._clock.give_up_change(waiting)

    def kill_next(self) -> bool:
        """A worker of the next world is killed."""
        workers = [w for w in self._cluster.workers if w.is_next]
        if workers:
            self._rng.choice(workers).exit(-9)
        return bool(workers)

    def close_job(self) -> bool:
        """The user presses Ctrl-C."""
        if self._rng.random() < 0.1:
            self._cluster.excuses.may_fail = True
            self._cluster.append(ev.JobClosed(reason="Ctrl-C", exit_code=130), "user")
        return True
