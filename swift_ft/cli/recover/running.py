"""A running run, for verbs that ask something of it: found by its rendezvous store and its name."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import socket
from collections.abc import Iterator
from functools import partial

from swift_ft.config.run_config import RunConfig
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.runs import newest_run
from swift_ft.coordination.store_client import connect
from swift_ft.errors import RendezvousLostError, UsageError
from swift_ft.launch.rendezvous.job_secret import found_secret
from swift_ft.network import JobSecret
from swift_ft.network.addresses import split_endpoint
from swift_ft.network.secret import token_of
from swift_ft.recovery.job_state import Phase, State
from swift_ft.torch_adapters.connections import shut_down, tcp_connections

_CONNECT_S = 10.0
_TRIES, _TRY_S = 100, 0.1


def declare_run(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name a running run."""
    parser.add_argument(
        "--rdzv-endpoint",
        required=True,
        metavar="HOST:PORT",
        help="as the run's launchers have it (swift-run --endpoint-out writes it to a file)",
    )
    parser.add_argument("--rdzv-id", default="run", metavar="RUN", help="the run's name (default run)")


@contextlib.contextmanager
def following(endpoint: str, name: str) -> Iterator[tuple[str, Follower]]:
    """The run that goes on under a name, and a follower of its journal that has started.

    At the end no thread is left that waits in torch: Python's end would abort the process.

    Raises:
        UsageError: if nothing answers there, there is no such run, or it has ended.
    """
    before = tcp_connections()
    run_id, follower = _follow(endpoint, name)
    try:
        yield run_id, follower
    finally:
        for _ in range(_TRIES):  # the thread may be about to open its connection
            shut_down(dict(tcp_connections().items() - before.items()))
            if follower.has_ended(_TRY_S):
                break


def _follow(endpoint: str, name: str) -> tuple[str, Follower]:
    client = partial(connect, StoreAddress.parse(endpoint), timeout_s=_CONNECT_S)
    try:
        run_id = newest_run(client, name)
        journal = open_journal(partial(client, run_id), by=who_asks())
    except RendezvousLostError as error:
        raise UsageError(
            f"no rendezvous store answers at {endpoint}: the run has ended, or check --rdzv-endpoint"
        ) from error
    if journal.is_empty():
        raise UsageError(f"there is no run {name!r} at {endpoint}: check --rdzv-id")
    follower = Follower(journal)
    if follower.state.phase == Phase.ENDED:
        raise UsageError(f"run {run_id} has ended")
    follower.start()
    return run_id, follower


def secret_of_run(endpoint: str, run_id: str, token_file: str | None) -> JobSecret:
    """The secret of a run: of the user's token, or of the one that its launchers have agreed on.

    Raises:
        UsageError: no token is given, and the run has one that only its members know.
    """
    if (token := token_of(token_file, os.environ)) is not None:
        return JobSecret.of_token(token)
    found = found_secret(connect(StoreAddress.parse(endpoint), run_id, timeout_s=_CONNECT_S), RunConfig())
    if found is None:
        raise UsageError(
            "this run has a token of its own: give the file that its launchers have, --token-file"
        )
    return found


def who_asks() -> str:
    """The user and the host that give an order, for the journal: ``anna@node7``."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container without a name for its user
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def machine_named(state: State, text: str) -> str:
    """The machine that somebody means.

    Raises:
        UsageError: if there is none.
    """
    members = state.membership.members
    if text.isdigit() and int(text) < state.shape.machines:
        if int(text) not in members:
            raise UsageError(f"slot {text} is empty: its machine was lost")
        return members[int(text)]
    known = {*members.values(), *state.membership.spares}
    if text in known:
        return text
    addresses = state.membership.addresses
    hosts = {machine: split_endpoint(addresses[machine])[0] for machine in known if machine in addresses}
    meant = _addresses_of(text)
    there: list[str] = [
        machine for machine, host in sorted(hosts.items()) if host in meant or _is_host(text, host)
    ]
    guests = state.membership.hosts  # they go with their host
    there = [machine for machine in there if machine not in guests] or there
    if not there:
        found = ", ".join(f"{machine} on {host}" for machine, host in sorted(hosts.items()))
        raise UsageError(
            f"there is no machine {text}: slots are 0 to {state.shape.machines - 1}, machines are {found}"
        )
    if len(there) > 1:
        raise UsageError(f"{text} has several machines: choose one of {', '.join(there)}")
    return there[0]


def _addresses_of(text: str) -> set[str]:
    """Those of a host that somebody names; none if it has no such name here."""
    if text.isdigit():  # the resolver takes a number for an address
        return set()
    with contextlib.suppress(OSError):
        return {str(address[0]) for *_, address in socket.getaddrinfo(text, None)}
    return set()


def _is_host(text: str, host: str) -> bool:
    """Whether somebody means a host, by its address, its whole name, or the first part of that."""
    return bool(text) and (text == host or (text == host.partition(".")[0] and not text.isdigit()))
