"""A run without a living machine is over, though its journal does not say so: the store outlived all.

A launcher that would continue it from its last checkpoint must not join it: nobody is left there to let it
in. What decides is what is known, and for a doubt the run lives. No machine has changed the sign of life in
the store for longer than a machine may be silent, and none answers at its port, either.

The launcher then closes the run in its journal. A machine that lived nevertheless, cut off from all others,
reads that there and ends: there are never two runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from swift_ft.config import detection_timings as timings
from swift_ft.config.run_config import RunConfig
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.life_signs import shows_life
from swift_ft.coordination.relay.lines import RELAY
from swift_ft.coordination.runs import Connect
from swift_ft.launch.rendezvous.job_secret import found_secret
from swift_ft.network import JobSecret, RefusedError
from swift_ft.network import connect as reach
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.events import JobClosed

_logger = logging.getLogger(__name__)

_AT_ONCE = 64


def closer_of_abandoned_runs(
    connect: Connect, config: RunConfig, secret: JobSecret | None
) -> Callable[[str], bool]:
    """A function that closes a run in which no machine lives. It returns whether it did.

    Args:
        connect: opens a client of the rendezvous store.
        config: of this launcher. Without ``resume``, ``auto_resume`` or ``fresh`` nothing is closed.
        secret: the job's, if the user gave it.
    """
    if config.resume or config.auto_resume or config.fresh:
        return partial(_close_if_abandoned, connect, config, secret)
    return lambda _: False


def _close_if_abandoned(connect: Connect, config: RunConfig, secret: JobSecret | None, run: str) -> bool:
    journal = open_journal(partial(connect, run), by="launcher")
    state = Follower(journal).state
    addresses = [*state.membership.addresses.values()]
    store = connect(run)
    silence_s = config.machine_silence_s * state.machine_patience + timings.SIGNS_MISSED * timings.SIGN_S
    # Before the first generation its machines may be about to join. Later it has none if all were lost, or
    # are left out; those that are to come back give signs of life meanwhile.
    if not (addresses or state.generation) or shows_life(store, silence_s):
        return False
    secret = secret or found_secret(store, config)
    if secret is not None and _any_answers(addresses, secret):
        return False
    reason = (
        f"run {run} is over: none of its machines is there any more (no sign of life in the rendezvous store "
        f"for {silence_s:g} s, and none answers)"
    )
    journal.append(JobClosed(reason=reason, cause=Cause.MACHINE))
    _logger.warning("%s. A new run begins.", reason, extra={"event": "run_abandoned"})
    return True


def _any_answers(addresses: list[str], secret: JobSecret) -> bool:
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="swift-abandoned") as pool:
        return any(pool.map(partial(_answers, secret), addresses))


def _answers(secret: JobSecret, address: str) -> bool:
    """Whether a machine of the job listens at an address: another program's port is none of it."""
    try:
        reach(address, secret, RELAY, timeout_s=timings.ADDRESS_ANSWERS_S).close()
    except (OSError, RefusedError):
        return False
    return True
