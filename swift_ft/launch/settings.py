"""Settings of an agent: the program that its workers run, and where."""

from __future__ import annotations

from dataclasses import dataclass

from swift_ft.config.run_config import RunConfig
from swift_ft.config.store_address import StoreAddress
from swift_ft.network import JobSecret


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent runs, and where.

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
