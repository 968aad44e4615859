"""Assembles one machine's launcher process: standby, rendezvous, agent."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn, Protocol

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from swift_ft.config import detection_timings as timings
from swift_ft.config.store_address import ETCD
from swift_ft.coordination.recovery_trace import RecoveryTrace
from swift_ft.coordination.relay.lines import RELAY
from swift_ft.coordination.store_client import Admit, connect, how_to_restart
from swift_ft.errors import SwiftError
from swift_ft.host.identity import machine_identity
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
from swift_ft.launch.schedulers.choice import scheduler_of
from swift_ft.launch.schedulers.requests import MachineRequests
from swift_ft.launch.schedulers.scheduler import RunPlace
from swift_ft.launch.settings import MachineJob
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
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import State, Verdict
from swift_ft.recovery.snapshot import JournalSnapshot
from swift_ft.torch_adapters.elastic_agent import MachineLogs
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_FIRST_EVENT_S = 60.0


class _JournalListener(Protocol):
    """An object that takes what is read of the journal, in the follower's thread."""

    def on_entries(self, entries: Sequence[Entry]) -> None: ...

    def on_snapshot(self, snapshot: JournalSnapshot) -> None: ...


def run_machine(job: MachineJob) -> Verdict:
    """Run one machine until the job ends. Must be called while the process has a single thread.

    Raises:
        KeptOutError: this machine differs from the others of the job, or is not healthy.
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
    name = f"m-{uuid.uuid4().hex[:8]}"
    recordings = AgentRecordings(job.run_id, f"agent {name}", lambda: _place(handler))
    trace = RecoveryTrace(f"agent {name}", recordings.take, until_live=True)

    def on_store(url: str) -> None:
        recordings.found(url)
        job.on_store(url)

    run_end = RunEnd(job.run_id, on_store, job.on_passed)
    status = _status(job)

    listeners: list[_JournalListener | None] = [run_end, status, job.excerpt]
    # A machine of a whole cluster on one host has a launcher that speaks for it.
    speaks_for_itself = job.lifeline is None and not job.host
    with ending_with_a_line() if speaks_for_itself else contextlib.nullcontext():
        handler = _rendezvous(job, name, trace, wake_w, [one for one in listeners if one is not None])
    settings = job.settings
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
        logs_specs = job.launch_config.logs_specs
        assert isinstance(logs_specs, MachineLogs)
        agent = MachineAgent(
            _worker_spec(job, handler),
            logs_specs,
            settings,
            standby,
            wake_r,
            run_end,
            passed,
            job.lifeline,
            status,
            _source_watch(job),
        )
        requests = _requests(job, handler)
        agent.run()
        if requests is not None:
            left = handler.machine in handler.follower.state.membership.fenced and not agent.run_is_over
            requests.close(gives_back=left and agent.verdict is not None and agent.verdict.ok)
        job.on_end(handler.follower.state)
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
        run_end.sweep_spools(settings.shutdown_s)
    return agent.verdict or Verdict(False, "the agent ended without a verdict", 1)


def _rendezvous(
    job: MachineJob,
    name: str,
    trace: RecoveryTrace,
    wake: socket.socket,
    listeners: Sequence[_JournalListener],
) -> JournalRendezvous:
    """The machine's membership. It follows the journal from now on.

    Args:
        name: this machine, unlike any other.
        trace: learns of each change before all others do.
        wake: gets a byte at each change.
        listeners: take what is read of the journal.
    """
    settings, config = job.settings, job.settings.config
    assert settings.secret is not None  # agreed on before

    def connect_to_store(admit: Admit) -> RendezvousStore:
        return connect(
            settings.store,
            job.run_id,
            timeout_s=config.join_timeout_s,
            silence_s=config.rendezvous_timeout_s,
            admit=admit,
        )

    def on_change(before: State, after: State) -> None:
        with contextlib.suppress(BlockingIOError):  # bytes that wake the agent wait there already
            wake.send(b"j")

    def on_entries(entries: Sequence[Entry]) -> None:
        for listener in listeners:
            listener.on_entries(entries)

    def on_snapshot(snapshot: JournalSnapshot) -> None:
        for listener in listeners:
            listener.on_snapshot(snapshot)

    return JournalRendezvous(
        connect_to_store,
        name=name,
        address=settings.address,
        run_id=job.run_id,
        opened=job.opened,
        preferred_slot=job.preferred_slot,
        on_change=on_change,
        trace=trace,
        on_entries=on_entries,
        on_snapshot=on_snapshot,
        compacts=not job.keeps_journal,
        setup=partial(
            setup_of, job.opened, config, settings.kind, settings.target, settings.secret, settings.args
        ),
        domain=config.domain_of(job.index),
        host=job.host,
        identity="" if job.host else machine_identity(job.index),
        reach=partial(reach, secret=settings.secret, purpose=RELAY, timeout_s=timings.HEAD_SILENCE_S),
        fanout=config.relay_fanout,
        append_s=config.rendezvous_timeout_s,
        joins_at_once=not settings.spare and not job.host,
        silence_s=config.machine_silence_s,
        store_place=str(settings.store),
        agreed=job.agreed,
    )


def _worker_spec(job: MachineJob, handler: JournalRendezvous) -> WorkerSpec:
    """The workers as torchelastic knows them."""
    torchrun = job.launch_config
    return WorkerSpec(
        role=torchrun.role,
        local_world_size=torchrun.nproc_per_node,
        entrypoint=job.settings.target,
        args=job.settings.args,
        rdzv_handler=handler,
        max_restarts=torchrun.max_restarts,
        monitor_interval=torchrun.monitor_interval,
        local_addr=torchrun.local_addr,
        event_log_handler=torchrun.event_log_handler,
        virtual_local_rank=torchrun.virtual_local_rank,
    )


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


def _requests(job: MachineJob, handler: JournalRendezvous) -> MachineRequests | None:
    """Of a machine of its own, if there is a scheduler."""
    config, store = job.settings.config, str(job.settings.store)
    if not config.scheduler or job.host:
        return None
    place = RunPlace(job.run_id, store, tuple(sys.orig_argv))
    return MachineRequests(scheduler_of(config.scheduler, place), handler, config.elastic_wait_s)


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
