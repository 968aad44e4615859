"""Mistakes in the options of a run, told to the user. Bounds of numbers are declared with each option."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

from swift_ft.config.option import flag_of
from swift_ft.config.run_config import RunConfig
from swift_ft.errors import UsageError
from swift_ft.faults import parse_faults
from swift_ft.network.secret import token_of


def validate(config: RunConfig) -> None:
    """Check all fields, once, where the user can still see it.

    Raises:
        UsageError: one line per mistake.
    """
    if mistakes := list(_mistakes(config)):
        raise UsageError("\n".join(mistakes))


def check_domains(config: RunConfig, machines: int) -> None:
    """Check that each machine and spare of this host has a failure domain, if one has.

    Raises:
        UsageError: there are more or fewer, or a name is empty.
    """
    names = [name.strip() for name in config.failure_domain.split(",")]
    if config.failure_domain and (len(names) != machines or not all(names)):
        raise UsageError(
            f"--failure-domain {config.failure_domain!r}: give {machines} name{'s' * (machines != 1)}, "
            "one for each machine and spare of this host, separated by commas."
        )


def _mistakes(config: RunConfig) -> Iterator[str]:
    for declared in dataclasses.fields(config):
        value = getattr(config, declared.name)
        if isinstance(value, (int, float)):
            mistake = declared.metadata["option"].mistake(flag_of(declared.name), value)
            if mistake is not None:
                yield mistake
    ways = [flag_of(name) for name in ("resume", "auto_resume", "fresh") if getattr(config, name)]
    if len(ways) > 1:
        yield f"{' and '.join(ways)} exclude each other: choose one."
    if config.check and (given := [*ways, *([flag_of("inject")] if config.inject else [])]):
        yield f"--check begins an undisturbed run in a temporary folder: leave out {' and '.join(given)}."
    for name in config.preloaded:
        named = all(part.isidentifier() for part in name.split("."))
        if not named or importlib.util.find_spec(name.partition(".")[0]) is None:
            yield f"--preload {name}: there is no such module here: correct the name, or install it."
    yield from _mistakes_of_metrics(config)
    yield from _mistakes_of_files(config)
    yield from _mistakes_of_security(config)
    try:
        _ = config.policy_limits, config.policy_prices
        parse_faults(config.inject)
    except UsageError as error:
        yield str(error)


def _mistakes_of_files(config: RunConfig) -> Iterator[str]:
    """Of those that the launcher writes: a run that ends well must not fail for want of a folder."""
    for name in ("events_out", "events_log", "endpoint_out"):
        value = getattr(config, name)
        if value is None or (name, value) == ("events_log", "-"):
            continue
        path = Path(value)
        if not path.parent.is_dir():
            yield f"{flag_of(name)}: there is no folder {path.parent}: create it."
            continue
        if path.is_dir():
            yield f"{flag_of(name)} {path}: this is a folder: name a file in it."
            continue
        written = path if path.exists() and name != "events_out" else path.parent
        if not os.access(written, os.W_OK):
            yield f"{flag_of(name)}: {written} may not be written: name another place."


def _mistakes_of_metrics(config: RunConfig) -> Iterator[str]:
    for name in ("metrics_port", "worker_metrics_port"):
        if getattr(config, name) and importlib.util.find_spec("prometheus_client") is None:
            yield f"{flag_of(name)} needs prometheus_client: pip install 'swift-ft[metrics]'."
    if config.metrics_address is not None:
        try:
            ipaddress.ip_address(config.metrics_address)
        except ValueError:
            yield (
                f"--metrics-address {config.metrics_address!r} is no address: give one of this host's, or "
                "0.0.0.0 for all of them."
            )


def _mistakes_of_security(config: RunConfig) -> Iterator[str]:
    names = ("tls_cert", "tls_key", "tls_ca")
    missing = [flag_of(name) for name in names if getattr(config, name) is None]
    if 0 < len(missing) < len(names):
        yield f"{', '.join(map(flag_of, names))} belong together: give {' and '.join(missing)}, too."
    try:
        token_of(config.token_file, {})
        if config.certificates is not None:
            config.certificates.check()
    except UsageError as error:
        yield str(error)
