"""The ring of agents: each watches the next few over channels to their ports.

A killed agent's connection ends within milliseconds; a silent one (power, network, SIGSTOP) misses its
heartbeats. Each machine has several watchers. They report in turn, so that one loss is one event, and the
death of a watcher leaves no gap. A watcher that hears none of its machines any more may be the one whose link
is gone: it waits for one more silence.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from swift_ft.config import detection_timings as timings
from swift_ft.launch.detection.awake_clock import AwakeClock
from swift_ft.launch.detection.policy import LostMachine, WatchedMachine, hears_another, silent_with
from swift_ft.network import Channel, JobSecret, Port, connect
from swift_ft.network.messages import encoded

WATCH = "watch"
"""The purpose of a connection to an agent's port."""

BEAT: dict[str, Any] = {"beat": 1}
_BYE: dict[str, Any] = {"bye": 1}
RECORDED = "recorded"
"""In a message to watchers, what a report of this machine's loss is to have (:class:`LostMachine`)."""

_END = getattr(select, "POLLRDHUP", select.POLLIN)
"""Wakes for the end of a connection alone, where the system can tell it; beats wait for the next look. They
are most of what comes, and a wake for each was most of what an idle agent cost (decision 79)."""


class Sentinel:
    """Lets other agents watch this one, and watches some of them.

    Three kinds of threads: the sentinel's own, which never waits for anything but beats; one for each machine
    that is being connected to; and one that reports, since the journal may take its time.

    Args:
        silence_s: a watched machine that sends nothing for so long counts as lost.
        on_lost: called in a thread of its own, for one machine after the other.
        port: at which the other agents watch this one.
        secret: the job's.
    """

    def __init__(
        self, *, silence_s: float, on_lost: Callable[[LostMachine], None], port: Port, secret: JobSecret
    ) -> None:
        self._allowed_s = silence_s
        self._beat_s = min(timings.LONGEST_BEAT_S, silence_s / timings.BEATS)
        self._together_s = timings.TOGETHER_BEATS * self._beat_s
        self._on_lost = on_lost
        self._secret = secret
        self._clock = AwakeClock(timings.BEAT_GRACE * self._beat_s, time.monotonic())
        # Owner of these five: the sentinel's thread.
        self._silence_s = silence_s
        self._watched: dict[str, WatchedMachine] = {}
        self._lines: dict[str, Channel] = {}
        self._watchers: list[Channel] = []
        self._told: dict[str, Any] = {}
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lost: queue.SimpleQueue[LostMachine | None] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="swift-sentinel", daemon=True)
        self._thread.start()
        threading.Thread(target=self._report, name="swift-sentinel-reports", daemon=True).start()
        port.serve(WATCH, self._let_in)

    def watch(self, machines: Mapping[str, str], *, patience: int = 1) -> None:
        """Watch only these machines from now on.

        Args:
            machines: where each is watched. This agent is the first one to report the first of them, the
                second one to report the second, and so on.
            patience: how many times as long as usual they may be silent.
        """
        copy = dict(machines)
        self._order(lambda: self._retarget(copy, patience))

    def tell(self, facts: dict[str, Any]) -> None:
        """Tell the agents that watch this one, and those that come, what its loss is to be reported with."""
        self._order(partial(self._tell, facts))

    def close(self) -> None:
        """Send a goodbye to the agents that watch this one, and stop."""
        self._closing = True
        self._order(lambda: None)
        self._lost.put(None)
        self._thread.join(timeout=5.0)

    # --------------------------------------------------------------------------- the sentinel's thread

    def _run(self) -> None:
        next_beat = time.monotonic()
        while not self._closing:
            pause_s = self._pause_s(next_beat)
            has_orders = self._wait(pause_s)
            now = time.monotonic()
            looked_s, awake_s = self._clock.awake_s, self._clock.look(now, pause_s)
            if has_orders:
                self._obey()
            for machine, line in list(self._lines.items()):
                self._listen(self._watched[machine], line, looked_s)
            if now >= next_beat:
                next_beat = now + self._beat_s
                self._send_to_watchers(BEAT)
            self._judge(awake_s)
        self._send_to_watchers(_BYE)
        for line in (*self._watchers, *self._lines.values()):
            line.close()

    def _wait(self, pause_s: float) -> bool:
        """Until a connection ends, or for so long. Whether there are orders, for which it ends, too."""
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        for line in self._lines.values():
            poll.register(line, _END)
        return any(fd == self._wake_r for fd, _ in poll.poll(1000 * pause_s))

    def _pause_s(self, next_beat: float) -> float:
        now = time.monotonic()
        due = [m.due_at(self._silence_s) for m in self._watched.values() if not m.over]
        return max(0.0, min(next_beat - now, *(at - self._clock.awake_s for at in due), self._beat_s))

    def _judge(self, now: float) -> None:
        """Report machines for which it is time. What they sent has been read before."""
        for watched in self._watched.values():
            if watched.over or now < watched.due_at(self._silence_s) or self._put_off(watched):
                continue
            watched.over = True
            self._hang_up(watched.machine)
            # One that fell silent with it may be heard again by now, or another one.
            deaf = watched.put_off and not hears_another(watched, self._watched.values(), self._together_s)
            self._lost.put(watched.as_lost(now, deaf=deaf))

    def _put_off(self, silent: WatchedMachine) -> bool:
        """Give a machine one more silence, once, if all others fell silent with it: these have it, too."""
        if silent.ended or silent.put_off:
            return False
        others = silent_with(silent, self._watched.values(), self._together_s)
        for one in (silent, *others):
            one.put_off = bool(others)
        return silent.put_off

    def _order(self, what: Callable[[], None]) -> None:
        """Have the sentinel's thread do something."""
        self._orders.put(what)
        os.write(self._wake_w, b"o")

    def _obey(self) -> None:
        os.read(self._wake_r, 4096)
        while not self._orders.empty():
            self._orders.get()()

    def _retarget(self, machines: dict[str, str], patience: int) -> None:
        """Watch these machines. One that this agent gave up is tried again, since the ring still has it."""
        self._silence_s = self._allowed_s * patience
        before, self._watched = self._watched, {}
        for turn, (machine, address) in enumerate(machines.items()):
            known = before.get(machine)
            if known is not None and not known.over and known.address == address:
                known.turn = turn
                self._watched[machine] = known
                continue
            self._hang_up(machine)
            watched = WatchedMachine(machine, address, turn, heard_at=self._clock.awake_s)
            self._watched[machine] = watched
            threading.Thread(
                target=self._dial, args=(watched,), name=f"swift-dial-{machine}", daemon=True
            ).start()
        for machine in before.keys() - machines.keys():
            self._hang_up(machine)
            before[machine].over = True

    def _unreachable(self, watched: WatchedMachine, reason: str) -> None:
        watched.end(reason, self._clock.awake_s)

    def _connected(self, watched: WatchedMachine, line: Channel) -> None:
        if watched.over or self._watched.get(watched.machine) is not watched:
            line.close()
            return
        watched.connected = True
        watched.hear(self._clock.awake_s)
        self._lines[watched.machine] = line

    def _listen(self, watched: WatchedMachine, line: Channel, looked_s: float) -> None:
        """Read what came since the last look. The kernel knows when: so watchers still report in turn."""
        try:
            messages = line.drain()
        except OSError as error:
            watched.end(f"its agent's connection ended ({error})", self._clock.awake_s)
            self._hang_up(watched.machine)
            return
        # What came before an end, too.
        for message in messages:
            watched.recorded = tuple(message.get(RECORDED, watched.recorded))
        if _BYE in messages:
            watched.over = True
            self._hang_up(watched.machine)
        elif line.ended:
            watched.end("its agent's connection ended", self._clock.awake_s)
            self._hang_up(watched.machine)
        elif messages:
            watched.hear(max(looked_s, self._clock.awake_s - line.quiet_s()))

    def _hang_up(self, machine: str) -> None:
        if (line := self._lines.pop(machine, None)) is not None:
            line.close()

    def _tell(self, facts: dict[str, Any]) -> None:
        self._told = facts
        self._send_to_watchers(facts)

    def _add_watcher(self, watcher: Channel) -> None:
        self._watchers.append(watcher)
        if self._told:
            self._send_to_watchers(self._told)

    def _send_to_watchers(self, what: dict[str, Any]) -> None:
        body = encoded(what)
        for watcher in list(self._watchers):
            try:
                watcher.try_send_encoded(body)  # one that does not read gets nothing
            except OSError:
                self._watchers.remove(watcher)
                watcher.close()

    # ---------------------------------------------------------------------------------- other threads

    def _let_in(self, watcher: Channel) -> None:
        """Called in a thread of the port."""
        self._order(partial(self._add_watcher, watcher))

    def _dial(self, watched: WatchedMachine) -> None:
        """Connect, in a thread of its own: a dead host does not answer, and that must hold up no other."""
        attempt_s = self._silence_s * timings.FIRST_CONTACT / timings.DIALS
        while not (watched.over or self._closing):
            try:
                line = connect(watched.address, self._secret, WATCH, timeout_s=attempt_s)
            except ConnectionRefusedError as error:
                reason = f"its agent cannot be reached ({error.strerror})"
                self._order(partial(self._unreachable, watched, reason))
                return
            except OSError as error:  # an end that comes at once may be that of a process about to die
                watched.trouble = error.strerror or str(error)
                time.sleep(self._beat_s)
            else:
                self._order(partial(self._connected, watched, line))
                return

    def _report(self) -> None:
        while (lost := self._lost.get()) is not None:
            self._on_lost(lost)
