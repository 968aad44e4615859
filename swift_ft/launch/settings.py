"""Settings of one machine's launcher and of its agent: the program, the run, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch.distributed.launcher.api import LaunchConfig

from swift_ft.config.run_config import RunConfig
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.journal_reader import Excerpt
from swift_ft.network import JobSecret
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The program that an agent runs, its store, and its options.

    Attributes:
        kind: ``script``, ``module`` or ``program`` (see :class:`swift_ft.launch.processes.worker.WorkerJob`).
        target: the script.
        args: its arguments.
        store: where the rendezvous store is.
        address: this host, as the other agents reach it.
        shutdown_s: seconds that workers get to end before they are killed.
        config: the run's configuration, which the workers get.
        spare: join only once all slots are filled.
        secret: the job's; None until the launchers have agreed on one.
        guest_number: the number of a guest among those of its host, from 1 on; 0 for a machine of its own.
        check: the folder of a check (``--check``); empty in a run that is to train to its end.
    """

    kind: str
    target: str
    args: tuple[str, ...]
    store: StoreAddress
    address: str
    shutdown_s: int
    config: RunConfig
    spare: bool = False
    secret: JobSecret | None = None
    guest_number: int = 0
    check: str = ""


@dataclass(frozen=True, slots=True)
class MachineJob:
    """The settings of one machine's launcher.

    Attributes:
        launch_config: torchrun's own launch configuration.
        settings: what the agent runs, and where.
        run_id: the run, or before it is found (`coordination/runs.py`) the name under which it is looked for.
        opened: the job's shape.
        preferred_slot: the slot to ask for.
        lifeline: see :class:`swift_ft.launch.agent.agent.MachineAgent`.
        excerpt: notes the entries of the journal, in a thread of the launcher; None if they are not wanted.
        keeps_journal: no entry of the journal is deleted: the launcher reads all of them in the end.
        index: number of this machine among those of this host.
        host: the machine on which this one is a guest; empty for a machine of its own.
        on_store: called with the URL of the session's store, each time that a worker here says it.
        on_passed: called with each point for faults that a worker here passes. It may be told several times.
        on_end: called with the last state that this machine knows, when the run has ended.
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
    on_passed: Callable[[str], None] = lambda _: None
    on_end: Callable[[State], None] = lambda _: None
    agreed: Mapping[str, str] = field(default_factory=dict)
