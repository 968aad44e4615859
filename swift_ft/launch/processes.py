"""A torchelastic process context whose workers are forked by the standby."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time

from torch.distributed.elastic.multiprocessing.api import LogsSpecs, PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from swift_ft.launch.control import line_pair
from swift_ft.launch.standby import Standby
from swift_ft.launch.worker import WorkerJob

__all__ = ["StandbyContext"]

_POLL_S = 0.01


class StandbyContext(PContext):
    """One machine's set of running workers: their pids, lines, logs and ends.

    Args:
        standby: forks them.
        jobs: by local rank.
        logs_specs: where their output goes; torchelastic's own rules.
        prefixes: what precedes each line of a worker's output, by local rank.
    """

    def __init__(
        self,
        standby: Standby,
        jobs: dict[int, WorkerJob],
        logs_specs: LogsSpecs,
        prefixes: dict[int, str],
    ) -> None:
        super().__init__(
            name="worker",
            entrypoint=jobs[0].target,
            args={rank: job.args for rank, job in jobs.items()},
            envs={rank: job.env for rank, job in jobs.items()},
            logs_specs=logs_specs,
            log_line_prefixes=prefixes,
        )
        self._standby = standby
        self._jobs = jobs
        self._pids: dict[int, int] = {}
        self.lines: dict[int, socket.socket] = {}
        self.exit_codes: dict[int, int] = {}

    def _start(self) -> None:
        for local_rank, job in self._jobs.items():
            ours, theirs = line_pair()
            self.lines[local_rank] = ours
            self._standby.launch(
                job, stdout=self.stdouts[local_rank], stderr=self.stderrs[local_rank], line=theirs
            )
        while len(self._pids) < self.nprocs:
            self.take_news(self._standby.receive())

    def take_news(self, news: dict[str, int] | None) -> int | None:
        """Note a start or an end that the standby told of. Returns the local rank that ended, if one of ours.

        Raises:
            ChildProcessError: if the standby is gone, and with it the workers.
        """
        if news is None:
            raise ChildProcessError("the standby process died")
        if "started" in news:
            self._pids[news["local_rank"]] = news["started"]
            return None
        for local_rank, pid in self._pids.items():
            if pid == news["ended"]:
                self.exit_codes[local_rank] = news["status"]
                return local_rank
        return None

    def _poll(self) -> RunProcsResult | None:
        failures = {
            rank: ProcessFailure(rank, self._pids[rank], code, self.error_files[rank])
            for rank, code in self.exit_codes.items()
            if code != 0
        }
        if failures or len(self.exit_codes) == self.nprocs:
            return RunProcsResult(failures=failures, stdouts=self.stdouts, stderrs=self.stderrs)
        return None

    def pids(self) -> dict[int, int]:
        """Pids by local rank."""
        return dict(self._pids)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Signal what still runs, wait for it, kill what is left."""
        deadline = time.monotonic() + timeout
        self._signal_running(death_sig)
        self._signal_running(signal.SIGCONT)  # a stopped worker must get the signal too
        while self._running() and time.monotonic() < deadline:
            self._wait_for_news()
        self._signal_running(signal.SIGKILL)
        while self._running():
            self._wait_for_news()
        for line in self.lines.values():
            line.close()

    def _running(self) -> list[int]:
        return [pid for rank, pid in self._pids.items() if rank not in self.exit_codes]

    def _signal_running(self, number: int) -> None:
        for pid in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wait_for_news(self) -> None:
        if not select.select([self._standby], [], [], _POLL_S)[0]:
            return
        news = self._standby.receive()
        if news is None:  # the standby is gone and took the workers with it
            self.exit_codes.update(dict.fromkeys(self._pids, -int(signal.SIGKILL)))
        else:
            self.take_news(news)
