"""The origin of the job's secret: the user, the launcher itself, or the other launchers."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable

from swift_ft.config import store_keys
from swift_ft.config.run_config import RunConfig
from swift_ft.network import JobSecret
from swift_ft.network.secret import token_of
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_TOKEN_BYTES = 32


def given_secret(config: RunConfig) -> JobSecret | None:
    """The secret of the user's token; None if there is none.

    Raises:
        UsageError: the token cannot be read, or is not one.
    """
    token = token_of(config.token_file, os.environ)
    return None if token is None else JobSecret.of_token(token, config.certificates)


def agreed_secret(
    rendezvous: RendezvousStore, config: RunConfig, keep: Callable[[str, str], object] = lambda *_: None
) -> JobSecret:
    """A secret that the launchers agree on in the rendezvous store, where the user gave none.

    It keeps out who reaches a machine's ports but not the store. Who reaches the store can read it.

    Args:
        rendezvous: the store.
        keep: called with the key and the token, for a store that is restarted.
    """
    _logger.warning(
        "This run has no token: anyone who reaches its rendezvous store can read its secret there and take "
        "part. Write one (openssl rand -hex 32) into a file on all machines, and give it as --token-file.",
        extra={"event": "no_token"},
    )
    key = store_keys.job_secret()
    token = rendezvous.compare_set(key, "", secrets.token_hex(_TOKEN_BYTES)).decode()
    keep(key, token)
    return JobSecret.of_token(token, config.certificates)


def found_secret(rendezvous: RendezvousStore, config: RunConfig) -> JobSecret | None:
    """The secret that launchers have agreed on in the store; None if they have not."""
    key = store_keys.job_secret()
    if not rendezvous.check([key]):
        return None
    return JobSecret.of_token(rendezvous.get(key).decode(), config.certificates)
