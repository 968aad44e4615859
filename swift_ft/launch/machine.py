"""One machine's launcher process, put together: standby, rendezvous, agent."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import partial

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig

from swift_ft.errors import SwiftError, UsageError
from swift_ft.launch.agent import AgentSettings, MachineAgent
from swift_ft.launch.rendezvous import JournalRendezvous
from swift_ft.launch.standby import Standby
from swift_ft.launch.store_service import connect, run_is_over
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State, Verdict

__all__ = ["MachineJob", "MachineLogs", "run_machine"]

_FIRST_EVENT_S = 60.0


@dataclass(frozen=True, slots=True)
class MachineJob:
    """What one machine's launcher needs to know.

    Attributes:
        config: torchrun's own launch configuration.
        settings: what the workers run.
        run_id: name of the run.
        opened: the job's shape.
        preferred_slot: the slot to ask for.
        lifeline: see :class:`MachineAgent`.
    """

    config: LaunchConfig
    settings: AgentSettings
    run_id: str
    opened: ev.Opened
    preferred_slot: int | None = None
    lifeline: int | None = None


class MachineLogs(DefaultLogsSpecs):
    """torchelastic's log folders, under the names of the run and the machine's slot."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """``<log_dir>/<run_id>/machine-<slot>/attempt_<generation>/<local_rank>/stdout.log``."""
        if self._root_log_dir != os.devnull:
            place = f"{envs[0]['TORCHELASTIC_RUN_ID']}/machine-{envs[0]['GROUP_RANK']}"
            self._run_log_dir = f"{self._root_log_dir}/{place}"  # type: ignore[assignment]  # torch says None
        return super().reify(envs)


def run_machine(job: MachineJob) -> Verdict:
    """Run one machine until the job ends. Must be called while the process has a single thread.

    Raises:
        UsageError: if the job that this machine joins has another shape.
    """
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks follow from the slot: no exchange about them
    standby = Standby()
    wake_r, wake_w = socket.socketpair()
    wake_w.setblocking(False)

    def on_change(before: State, after: State) -> None:
        try:
            wake_w.send(b"j")
        except BlockingIOError:
            return  # enough bytes wait there already

    settings, config = job.settings, job.config
    handler = JournalRendezvous(
        partial(connect, settings.host, settings.port, job.run_id, timeout_s=settings.timeouts.join_s),
        address=settings.address,
        run_id=job.run_id,
        opened=job.opened,
        preferred_slot=job.preferred_slot,
        join_s=settings.timeouts.join_s,
        on_change=on_change,
    )
    try:
        _check_shape(handler, job.opened)
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=settings.target,
            args=settings.args,
            rdzv_handler=handler,
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            local_addr=config.local_addr,
            event_log_handler=config.event_log_handler,
            virtual_local_rank=config.virtual_local_rank,
        )
        assert config.logs_specs is not None
        agent = MachineAgent(spec, config.logs_specs, settings, standby, wake_r, job.lifeline)
        agent.run()
        run_is_over(connect(settings.host, settings.port, job.run_id))
    except ChildFailedError as error:
        return Verdict(False, str(error), 1)
    finally:
        standby.close()
    return agent.verdict or Verdict(False, "the agent ended without a verdict", 1)


def _check_shape(handler: JournalRendezvous, opened: ev.Opened) -> None:
    state = handler.follower.wait_for(lambda state: state.machines > 0, _FIRST_EVENT_S)
    if state is None:
        raise SwiftError(f"The journal of run {handler.get_run_id()} stayed empty for {_FIRST_EVENT_S:g} s.")
    if (state.machines, state.workers) != (opened.machines, opened.workers):
        raise UsageError(
            f"Run {handler.get_run_id()} has {state.machines} machines with {state.workers} workers each, "
            f"but this one was started for {opened.machines} with {opened.workers}: "
            "give all of them the same --nnodes and --nproc-per-node."
        )
