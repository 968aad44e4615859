"""Assembles one machine's launcher process: standby, rendezvous, agent."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig

from swift_ft.config import detection_timings as timings
from swift_ft.config.store_address import ETCD
from swift_ft.coordination.journal_reader import Excerpt
from swift_ft.coordination.recovery_trace import RecoveryTrace
from swift_ft.coordination.relay.lines import RELAY
from swift_ft.coordination.store_client import Admit, connect, how_to_restart
from swift_ft.errors import SwiftError
from swift_ft.launch.agent.agent import MachineAgent
from swift_ft.launch.agent.endpoint import AgentEndpoint
from swift_ft.launch.agent.recordings import AgentRecordings
from swift_ft.launch.agent.run_end import RunEnd
from swift_ft.launch.agent.source_watch import SourceWatch
from swift_ft.launch.agent.status import AgentStatus
from swift_ft.launch.detection.store_watch import StoreWatch
from swift_ft.launch.processes.standby import Standby
from swift_ft.launch.rendezvous.journal_rendezvous import JournalRendezvous
from swift_ft.launch.rendezvous.setup import setup_of
from swift_ft.launch.rendezvous.store_service import run_is_over
from swift_ft.launch.settings import AgentSettings
from swift_ft.launch.signals import (
    PassedSignals,
    SignalException,
    default_stop_signals,
    ending_with_a_line,
    ignore_stop_signals,
    raise_stop_signals,
    stopped_by,
)
from swift_ft.network import connect as reach
from swift_ft.observe.spans import recorder
from swift_ft.program.discovery import main_source
from swift_ft.program.kept_sources import kept_sources
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import State, Verdict
from swift_ft.recovery.snapshot import JournalSnapshot
from swift_ft.torch_adapters.elastic_agent import MachineLogs
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_FIRST_EVENT_S = 60.0


@dataclass(frozen=True, slots=True)
class MachineJob:
    """The settings of one machine's launcher.

    Attributes:
        launch_config: torchrun's own launch configuration.
        settings: what the agent runs, and where.
        run_id: the run, or before it is found (`coordination/runs.py`) the name under which it is looked for.
        opened: the job's shape.
        preferred_slot: the slot to ask for.
        lifeline: see :class:`MachineAgent`.
        excerpt: notes the entries of the journal, in a thread of the launcher; None if they are not wanted.
        keeps_journal: no entry of the journal is deleted: the launcher reads all of them in the end.
        index: number of this machine among those of this host.
        host: the machine on which this one is a guest; empty for a machine of its own.
        on_store: called with the URL of the session's store, each time that a worker here says it.
        agreed: what the launchers have agreed on in the rendezvous store, by key.
    """

    launch_config: LaunchConfig
    settings: AgentSettings
    run_id: str
    opened: ev.JobOpened
    preferred_slot: int | None = None
    lifeline: int | None = None
    excerpt: Excerpt | None = None
    keeps_journal: bool = False
    index: int = 0
    host: str = ""
    on_store: Callable[[str], None] = lambda _: None
    agreed: Mapping[str, str] = field(default_factory=dict)


def run_machine(job: MachineJob) -> Verdict:
    """Run one machine until the job ends. Must be called while the process has a single thread.

    Raises:
        UsageError: if this machine differs from the others of the job.
    """
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks follow from slots
    default_stop_signals()  # until this machine is in the journal there is nothing to hand over
    gc.freeze()  # what is imported never becomes garbage: to look through it takes 0.2 s, also in a recovery
    passed = PassedSignals()
    standby = Standby(
        job.settings.config.preloaded,
        close_in_child=passed.close_in_child,
        become_guest=partial(_become_guest, job),
    )
    wake_r, wake_w = socket.socketpair()
    wake_w.setblocking(False)

    started = recorder.now()

    def on_change(before: State, after: State) -> None:
        try:
            wake_w.send(b"j")
        except BlockingIOError:
            return  # bytes that wake the agent wait there already

    name = f"m-{uuid.uuid4().hex[:8]}"
    recordings = AgentRecordings(job.run_id, f"agent {name}", lambda: _place(handler))
    trace = RecoveryTrace(f"agent {name}", recordings.take, until_live=True)

    def on_store(url: str) -> None:
        recordings.found(url)
        job.on_store(url)

    run_end = RunEnd(job.run_id, on_store)
    status = _status(job)

    def on_entries(entries: Sequence[Entry]) -> None:
        run_end.on_entries(entries)
        if status is not None:
            status.on_entries(entries)
        if job.excerpt is not None:
            job.excerpt.on_entries(entries)

    def on_snapshot(snapshot: JournalSnapshot) -> None:
        run_end.on_snapshot()
        if status is not None:
            status.on_snapshot(snapshot)
        if job.excerpt is not None:
            job.excerpt.on_snapshot(snapshot)

    settings, launch_config = job.settings, job.launch_config

    def connect_to_store(admit: Admit) -> RendezvousStore:
        return connect(
            settings.store,
            job.run_id,
            timeout_s=settings.config.join_timeout_s,
            silence_s=settings.config.rendezvous_timeout_s,
            admit=admit,
        )

    setup = partial(
        setup_of,
        job.opened,
        settings.config,
        settings.kind,
        settings.target,
        settings.secret,
        settings.args,
    )
    assert settings.secret is not None  # agreed on before
    # A machine of a whole cluster on one host has a launcher that speaks for it.
    speaks_for_itself = job.lifeline is None and not job.host
    with ending_with_a_line() if speaks_for_itself else contextlib.nullcontext():
        handler = JournalRendezvous(
            connect_to_store,
            name=name,
            address=settings.address,
            run_id=job.run_id,
            opened=job.opened,
            preferred_slot=job.preferred_slot,
            join_s=settings.config.join_timeout_s,
            on_change=on_change,
            trace=trace,
            on_entries=on_entries,
            on_snapshot=on_snapshot,
            compacts=not job.keeps_journal,
            setup=setup,
            domain=settings.config.domain_of(job.index),
            host=job.host,
            reach=partial(reach, secret=settings.secret, purpose=RELAY, timeout_s=timings.HEAD_SILENCE_S),
            fanout=settings.config.relay_fanout,
            append_s=settings.config.rendezvous_timeout_s,
            joins_at_once=not settings.spare and not job.host,
            silence_s=settings.config.machine_silence_s,
            store_place=str(settings.store),
            agreed=job.agreed,
        )
    watch = StoreWatch(
        handler.store,
        str(settings.store),
        limit_s=settings.config.rendezvous_timeout_s,
        remedy="" if settings.store.backend == ETCD else how_to_restart(settings.store),
    )
    endpoint = _endpoint(job, status, watch)
    try:
        raise_stop_signals()
        _wait_until_opened(handler)
        trace.joined(handler.follower.state, started)
        spec = WorkerSpec(
            role=launch_config.role,
            local_world_size=launch_config.nproc_per_node,
            entrypoint=settings.target,
            args=settings.args,
            rdzv_handler=handler,
            max_restarts=launch_config.max_restarts,
            monitor_interval=launch_config.monitor_interval,
            local_addr=launch_config.local_addr,
            event_log_handler=launch_config.event_log_handler,
            virtual_local_rank=launch_config.virtual_local_rank,
        )
        assert isinstance(launch_config.logs_specs, MachineLogs)
        agent = MachineAgent(
            spec,
            launch_config.logs_specs,
            settings,
            standby,
            wake_r,
            run_end,
            passed,
            job.lifeline,
            status,
            _source_watch(job),
        )
        agent.run()
        recordings.drain(settings.shutdown_s)
        if agent.run_is_over:
            run_is_over(handler.store)
    except ChildFailedError as error:
        return Verdict(False, str(error), 1)
    except SignalException as error:  # before this machine joined, or after the run's end
        return Verdict(False, stopped_by(error.sigval), 128 + error.sigval)
    finally:
        ignore_stop_signals()
        watch.close()
        if endpoint is not None:
            endpoint.close()
        standby.close()
    return agent.verdict or Verdict(False, "the agent ended without a verdict", 1)


def _place(handler: JournalRendezvous) -> tuple[str, int | None]:
    return handler.machine, handler.follower.state.slot_of(handler.machine)


def _become_guest(job: MachineJob, slot: int, host: str, number: int) -> NoReturn:
    """Run a second machine here, in a child of the standby. Its output is the launcher's."""
    config = replace(job.settings.config, metrics_port=0)  # its host serves that port
    settings = replace(job.settings, config=config, spare=False, guest_number=number)
    guest = replace(job, settings=settings, preferred_slot=slot, host=host, lifeline=None, excerpt=None)
    code = 1
    try:
        code = run_machine(guest).exit_code
    except SwiftError as error:
        _logger.error("a guest of this machine: %s", error, extra={"event": "machine_failed"})  # noqa: TRY400  (the line is enough)
    except Exception as error:  # its host takes another one, or says why it cannot
        text = f"{type(error).__name__}: {error}"
        _logger.error("a guest of this machine: %s", text, extra={"event": "machine_failed"})  # noqa: TRY400  (the line is enough)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _source_watch(job: MachineJob) -> SourceWatch | None:
    """The first machine of each host says for all of them that files were edited."""
    settings, sources = job.settings, kept_sources()
    if sources is None or job.index or job.host:
        return None
    is_module = settings.kind == "module"
    kept = main_source(settings.target, as_module=is_module) is not None
    return SourceWatch(sources, None if kept or is_module else settings.target)


def _status(job: MachineJob) -> AgentStatus | None:
    config = job.settings.config
    if not config.metrics_port:
        return None
    # The loop waits for a silent worker's answer, and for workers to end: longer is stuck.
    loop_limit_s = 3 * config.heartbeat_timeout_s + job.settings.shutdown_s + timings.LOOP_MARGIN_S
    return AgentStatus(loop_limit_s=loop_limit_s)


def _endpoint(job: MachineJob, status: AgentStatus | None, watch: StoreWatch) -> AgentEndpoint | None:
    if status is None:
        return None
    status.observe_store(watch.silence_s, watch.notice_s)
    config = job.settings.config
    address = config.metrics_listen_address(job.settings.address)
    return AgentEndpoint(address, config.metrics_port + job.index, status)


def _wait_until_opened(handler: JournalRendezvous) -> None:
    state = handler.follower.wait_for(lambda state: state.shape.machines > 0, _FIRST_EVENT_S)
    if state is None:
        raise SwiftError(
            f"The journal of run {handler.get_run_id()} stayed empty for {_FIRST_EVENT_S:g} s, as when "
            "the rendezvous store was started anew meanwhile: start this machine again."
        )
