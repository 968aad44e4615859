"""The agent's end of its workers' channels: their messages, and how long ago the last one came."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from swift_ft.coordination.agent_channel import receive
from swift_ft.launch.detection.policy import Heartbeats
from swift_ft.launch.processes.stacks import StackFile


class WorkerChannels:
    """The agent's ends of its workers' channels, and what came through them. All maps are by local rank.

    Owner: the agent's main thread. Threads that serve metrics read :attr:`beats` and :meth:`ages`.

    Args:
        selector: the agent's; a channel is registered with the function that reads it as data.
        on_message: called with each message.
        recorded: shared with the channels of this machine's other workers; None if there are none.

    Attributes:
        heartbeats: when each worker was heard last.
        sessions: workers that hold a session.
        after_loop: workers whose script has left its loop.
        interrupted: why communication failed in what the script runs, until the worker has put that back.
        failed: what a worker said before it ended with an error.
        lost: what it said before it ended for another reason than its script's error: what its machine has
            done to it, or that it is to start again.
        beats: the facts of each worker's last heartbeat that had any, such as its ``iteration``.
        shown: what each worker does, by its rank in the job, for those who watch the run.
        recorded: by its rank in the job, the iteration before which its records are given. It stays: what is
            given once is given.
        stacks: where it is, even if it cannot say so itself.
        since: the time at which it was started, by the monotonic clock; None if none was.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_message: Callable[[dict[str, Any]], None] = lambda _: None,
        *,
        recorded: dict[int, int] | None = None,
    ) -> None:
        self._selector = selector
        self._on_message = on_message
        self._channels: dict[int, socket.socket] = {}
        self.heartbeats = Heartbeats()
        self.sessions: set[int] = set()
        self.after_loop: set[int] = set()
        self.interrupted: dict[int, str] = {}
        self.failed: dict[int, dict[str, Any]] = {}
        self.lost: dict[int, dict[str, Any]] = {}
        self.beats: dict[int, dict[str, Any]] = {}
        self.shown: dict[int, dict[str, Any]] = {}
        self.recorded: dict[int, int] = {} if recorded is None else recorded
        self.stacks: dict[int, StackFile] = {}
        self.since: float | None = None

    @property
    def ran_s(self) -> int:
        """Seconds since the workers were started; 0 if none was."""
        return 0 if self.since is None else int(time.monotonic() - self.since)

    def open(self, channels: Mapping[int, socket.socket]) -> None:
        """Begin to listen to workers that were just started."""
        self.sessions, self.after_loop, self.interrupted = set(), set(), {}
        self.failed, self.lost, self.beats, self.shown = {}, {}, {}, {}
        self._close_stacks()
        self.since = time.monotonic()
        self._channels = dict(channels)
        for local_rank, channel in self._channels.items():
            channel.setblocking(False)
            self.heartbeats.hear(local_rank, time.monotonic())
            self._selector.register(channel, selectors.EVENT_READ, data=partial(self.read, local_rank))

    def take_over(self, other: WorkerChannels) -> None:
        """Listen to the workers of another one from now on, and know what that has heard of them.

        What is recorded, both share from the beginning.
        """
        self.close()
        other._unregister()
        self.heartbeats, self.sessions, self.after_loop = other.heartbeats, other.sessions, other.after_loop
        self.interrupted = other.interrupted
        self.failed, self.lost, self.beats, self.shown = other.failed, other.lost, other.beats, other.shown
        self._close_stacks()
        self.since = other.since
        self.stacks, other.stacks = other.stacks, {}
        self._channels, other._channels = other._channels, {}
        for local_rank, channel in self._channels.items():
            self._selector.register(channel, selectors.EVENT_READ, data=partial(self.read, local_rank))

    def _unregister(self) -> None:
        for channel in self._channels.values():
            self._selector.unregister(channel)

    def close(self) -> None:
        """Stop listening, before the workers are stopped."""
        self.since = None
        for local_rank in list(self._channels):
            self._drop(local_rank)

    def read(self, local_rank: int) -> None:
        """Read all that a worker has sent so far."""
        while (channel := self._channels.get(local_rank)) is not None:
            try:
                message = receive(channel)
            except BlockingIOError:
                return
            if message is None:
                self._drop(local_rank)
                return
            self.heartbeats.hear(local_rank, time.monotonic())
            self._note(local_rank, message)

    def _note(self, local_rank: int, message: dict[str, Any]) -> None:
        if "failed" in message:
            self.failed[local_rank] = message
        if "lost" in message:
            self.lost[local_rank] = message
        if beat := message.get("beat"):
            self.beats[local_rank] = beat
        if shown := message.get("shown"):
            self.shown[shown["rank"]] = shown["facts"]
        if recorded := message.get("recorded"):
            self.recorded[recorded["rank"]] = recorded["before"]
        if stack := message.get("stack"):
            with contextlib.suppress(OSError):  # the worker is gone already
                self.stacks[local_rank] = StackFile(**stack)
        if "session" in message:
            self.sessions.add(local_rank)
        if (in_loop := message.get("in_loop")) is not None:
            (self.after_loop.discard if in_loop else self.after_loop.add)(local_rank)
        if (interrupted := message.get("interrupted")) is not None:
            self.interrupted[local_rank] = interrupted
        self._on_message(message)

    def _close_stacks(self) -> None:
        for stack in self.stacks.values():
            stack.close()
        self.stacks = {}

    def iteration(self, local_rank: int) -> int | None:
        """Iterations that a worker has completed, by its last heartbeat; None if that is unknown."""
        return self.beats.get(local_rank, {}).get("iteration") or None

    def recorded_with(self, others: Mapping[int, int]) -> dict[int, int]:
        """By rank, the iterations before which records are given, by what is heard here or elsewhere."""
        ranks = self.recorded.keys() | others.keys()
        return {rank: max(self.recorded.get(rank, 0), others.get(rank, 0)) for rank in ranks}

    def without_session(self) -> int:
        """Number of workers that can be heard and hold no session."""
        return len(self._channels) - len(self.sessions)

    def hears(self, local_rank: int) -> bool:
        """Whether a worker's channel is open."""
        return local_rank in self._channels

    def ages(self) -> dict[int, float]:
        """Seconds since each running worker was heard last."""
        return self.heartbeats.ages(time.monotonic())

    def silent(self, silence_s: float) -> list[int]:
        """Workers that have sent nothing for so long. Call it again and again, more often than that.

        One that is done with its loop exports and evaluates, in calls that may hold the interpreter for long.
        Nobody waits for it any more.
        """
        silent = self.heartbeats.silent(time.monotonic(), silence_s)
        return [local_rank for local_rank in silent if local_rank not in self.after_loop]

    def hears_within(self, local_rank: int, limit_s: float) -> bool | None:
        """Wait for a message of one worker. None if its channel ends instead."""
        channel = self._channels.get(local_rank)
        if channel is None or not select.select([channel], [], [], limit_s)[0]:
            return False
        return True if receive(channel) is not None else None

    def _drop(self, local_rank: int) -> None:
        self._selector.unregister(self._channels.pop(local_rank))
