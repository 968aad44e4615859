"""The setup that all machines of a job must share: versions, the script, its arguments, and flags."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from swift_ft.config.option import flag_of
from swift_ft.config.run_config import RunConfig
from swift_ft.launch.rendezvous.compared import argument_facts, environment_facts
from swift_ft.network import JobSecret
from swift_ft.program.discovery import environment_read_by, main_source
from swift_ft.program.kept_sources import digest_of
from swift_ft.recovery.events import JobOpened

_SHAPE = ("--nnodes", "--nproc-per-node", "--max-restarts")
COMMON_FLAGS = frozenset(_SHAPE) | {
    flag_of(field.name) for field in dataclasses.fields(RunConfig) if field.metadata["option"].same_everywhere
}
"""The flags of swift-run that all machines of a job must have in common."""

_SHOWN = 12
"""Digits of a digest: enough to tell secrets apart."""


def setup_of(
    opened: JobOpened,
    config: RunConfig,
    kind: str,
    target: str,
    secret: JobSecret | None = None,
    args: Sequence[str] = (),
) -> tuple[str, ...]:
    """The facts that machines compare, as ``name: value``.

    A file that is not kept (`program/kept_sources.py`) may change while the job runs, so call it again for
    each time that a machine offers itself.

    Args:
        opened: the job as this machine would open it.
        config: the run's configuration.
        kind: ``script``, ``module`` or ``program`` (see :class:`swift_ft.launch.processes.worker.WorkerJob`).
        target: the script's path, or a module's or program's name.
        secret: the job's, which is not shown: the fact is the same where the secret is.
        args: the script's arguments.
    """
    may_differ = config.different
    facts = {
        "swift_ft": _version(),
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        f"the {kind}": f"{Path(target).name} ({_digest(kind, target)})",
        **dict(zip(_SHAPE, (opened.machines, opened.workers_per_machine, opened.restarts), strict=True)),
    }
    for declared in dataclasses.fields(config):
        if flag_of(declared.name) in COMMON_FLAGS:
            facts[flag_of(declared.name)] = getattr(config, declared.name)
    if secret is not None:
        facts["the job's secret (--token-file)"] = secret.token("setup")[:_SHOWN]
        certificates = secret.certificates
        facts["TLS (--tls-cert)"] = "on" if certificates is not None else "off"
        if certificates is not None:
            facts["the authorities (--tls-ca)"] = certificates.authorities().hex()[:_SHOWN]
    facts |= argument_facts(args, may_differ) | environment_facts(environment_read_by(), may_differ)
    return tuple(f"{name.replace(': ', ':')}: {value}" for name, value in facts.items())


def is_readable_file(path: str) -> bool:
    """Whether this user can read a file there. No error where not even its folder may be looked into."""
    return os.access(path, os.R_OK) and Path(path).is_file()


def _version() -> str:
    try:
        return version("swift-ft")
    except PackageNotFoundError:  # run from a checkout
        return "not installed"


def _digest(kind: str, target: str) -> str:
    """The beginning of the SHA-256 of a script's content. A program has none: it may differ by host."""
    if kind != "program" and (kept := main_source(target, as_module=kind == "module")) is not None:
        return kept.digest
    path: str | None = target
    if kind == "module":
        found = importlib.util.find_spec(target)
        path = found.origin if found is not None else None
    if kind == "program" or path is None or not Path(path).is_file():
        return "not read"
    return digest_of(Path(path).read_bytes())
