"""Checks that a worker runs the job's program: the settings of its session, and its own modules.

The first worker that begins to train says what the program is, and each worker says what is its own alone. A
replacement from another launcher, whose files were edited since, would train to other weights, or never
commit a checkpoint again. What its launcher can compare has been compared (`launch/rendezvous/setup.py`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.errors import UsageError
from swift_ft.program.kept_sources import digest_of, kept_sources
from swift_ft.program.own_code import is_own_file
from swift_ft.runtime.settings import Settings
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_OF_ALL = (
    "checkpoint_every",
    "keep_checkpoints",
    "keep_logs",
    "snapshot_every",
    "recovery_groups",
    "script_log_limit_bytes",
    "check_data",
    "verify",
    "verify_every",
    "on_corruption",
)
"""Settings that must be equal at all workers. The seed is not among them: some scripts add their rank to it.
Nor are the log's options, for one machine may have less room on its disk than another."""

_ARGUMENTS = {"recovery_groups": "groups"}
"""The session's argument of a setting, where the two have unlike names."""


def check_program(
    context: WorkerContext,
    rendezvous: RendezvousStore,
    writer: BackgroundWriter,
    settings: Settings,
    state: Mapping[str, Any],
    facts: Mapping[str, str],
) -> None:
    """Compare a worker's program with that of the job.

    Args:
        context: the worker's place.
        rendezvous: where the job's program is noted.
        writer: notes this worker's.
        state: what the session protects, by name.
        facts: further ones that must be equal at all workers, by name.

    Raises:
        UsageError: they differ; names what does, with both values.
    """
    of_all = {_named(name): _text(getattr(settings, name)) for name in _OF_ALL} | dict(facts)
    own = {_named("seed"): _text(settings.seed), "Session(state)": ", ".join(sorted(state))}
    modules = {
        f"the module {name}": digest
        for name, digest in source_digests().items()
        if name not in context.config.different
    }
    # Of workers that come at once one sets it, and all get the same answer.
    job = json.loads(rendezvous.compare_set(store_keys.program(), "", json.dumps({**of_all, **modules})))
    key = store_keys.program_of(context.rank)
    # Modules that not all ranks import: compared with the rank's own earlier worker only.
    own |= {name: digest for name, digest in modules.items() if name not in job}
    if context.started_in > 1 and rendezvous.check([key]):
        job |= json.loads(rendezvous.get(key))
    here = {**of_all, **modules, **own}
    differences = [
        f"{name} is {here[name]} here and {job[name]} in the job"
        for name in here
        if job.get(name, here[name]) != here[name]
    ]
    if differences:
        raise UsageError(
            f"Worker {context.rank} runs another program than the job: {'; '.join(differences)}. Start its "
            "machine with the files, arguments and environment that the job began with, or end the job and "
            "go on with --resume. (--may-differ MODULE is for modules that are meant to differ.)",
            differs=True,
        )
    # Last, so that a worker that is refused does not say what its successors have to run.
    writer.set(key, json.dumps(own))


def _named(setting: str) -> str:
    return f"Session({_ARGUMENTS.get(setting, setting)})"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def source_digests() -> dict[str, str]:
    """The user's own modules, by name, with the digest of the source that was loaded, or would be.

    Extensions are left out: each machine may have compiled its own.
    """
    sources = kept_sources()
    kept = sources.all() if sources is not None else []
    found = {source.module: source.digest for source in kept}
    return {**dict(_loaded_otherwise({source.path for source in kept})), **found}


def _loaded_otherwise(kept: set[str]) -> Iterator[tuple[str, str]]:
    """Modules that no import of Python's own has loaded, such as those of a hook that rewrites them."""
    # A copy, since another thread may import something meanwhile.
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or name in ("__main__", "__mp_main__"):
            continue
        path = os.path.abspath(file)  # noqa: PTH100  (a link is not followed)
        if path not in kept and is_own_file(path) and Path(path).is_file():
            yield name, digest_of(Path(path).read_bytes())
