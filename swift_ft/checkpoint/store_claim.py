"""The claim of a store: one run owns it at a time, and nothing is overwritten without permission."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed
from torch.distributed import DistError

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.run_record import RECORD, RUNS, read_record, run_directory, write_record
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.checkpoint.worker_record import sweep_records
from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import (
    ForeignLogError,
    GaveUpError,
    RecoveryError,
    StoreInUseError,
    SwiftError,
    TopologyMismatchError,
    UsageError,
    first_line,
)
from swift_ft.logging import parse_segment_name, read_segment
from swift_ft.observe.waits import waiting
from swift_ft.storage.store import TEMPORARY_SUFFIX, Store
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

_LOG_ROOT = "log"
_LOG = re.compile(r"rank-(\d{5,})")
_JOURNAL = "journal"
_SEEN_WITHIN_S = 10.0


def log_directory(rank: int) -> str:
    """The store's folder of a worker's message log."""
    return f"{_LOG_ROOT}/rank-{rank:05d}"


def journal_directory(run_id: str) -> str:
    """The store's folder of a run's archived journal."""
    return f"{run_directory(run_id)}/{_JOURNAL}"


def open_store(store: Store, context: WorkerContext, rendezvous: RendezvousStore) -> None:
    """See to it that the store can be written.

    One that this job has never used may be mistyped: that is said at once. Once the job has claimed it, the
    store is waited for, whatever is wrong with it: the survivors of a loss wait, too.

    Raises:
        StoreNotWritableError: it cannot be written.
    """
    if not rendezvous.check([store_keys.claimed()]):
        store.probe()
        return
    store.anchor(RECORD)
    # A little less than the others wait for this worker's report: the line below is better than theirs.
    store.probe(context.config.within_report_s)


def claim_store(
    store: Store,
    context: WorkerContext,
    rendezvous: RendezvousStore,
    topology: dict[str, Any],
    timeout_s: float,
    settings: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Make the store this run's own. Worker 0 decides, the others wait for it.

    The settings are noted in it for people and tools: a resumed run may have others.

    From then on a local store without its record counts as gone (:meth:`Store.anchor`).

    Returns:
        The iterations of all committed checkpoints on worker 0, oldest first; none on all others.

    Raises:
        StoreInUseError, TopologyMismatchError: see the command line's ``--resume``,
            ``--auto-resume`` and ``--fresh``.
        GaveUpError: if worker 0 does not decide in time.
    """
    key = store_keys.claimed()
    if context.rank != 0:
        try:
            with waiting(f"worker 0 to claim {store.url}", timeout_s):
                rendezvous.wait([key], timedelta(seconds=timeout_s))
        except (DistError, RuntimeError) as error:
            raise GaveUpError(f"Worker 0 did not claim {store.url} within {timeout_s:g} s.") from error
        if context.started_in == 1:  # later a store may be lost, which ends no run
            _check_shared(store, context)
        store.anchor(RECORD)
        return ()
    if rendezvous.check([key]):  # by an earlier worker 0, which may have died before it reported this
        checkpoints = tuple(json.loads(rendezvous.get(key))["checkpoints"])
    else:
        with waiting(f"the store {store.url} to answer"):
            checkpoints = _decide(store, context, topology, settings or {})
        # After the record, which whoever sees the key looks for.
        facts = {"checkpoints": checkpoints, "store": store.url, "secret": store.has_secret_url}
        rendezvous.set(key, json.dumps(facts))
    store.anchor(RECORD)
    return checkpoints


def _check_shared(store: Store, context: WorkerContext) -> None:
    """Whether worker 0 has claimed this very store, and not one of its own.

    A network's file system may show a new file some seconds later than it was written.

    Raises:
        UsageError: this worker's store does not have the run.
    """
    tries = Retrying(
        stop=stop_after_delay(_SEEN_WITHIN_S),
        wait=wait_fixed(0.2),
        retry=retry_if_result(lambda run_id: run_id != context.run_id),
        retry_error_callback=lambda _: None,
    )
    with waiting(f"the store {store.url} to show what worker 0 has written", _SEEN_WITHIN_S):
        found = tries(lambda: (read_record(store) or {}).get("run_id"))
    if found is None:
        raise UsageError(
            f"{store.url} does not have what worker 0 has written into its store: give all workers one "
            "store, which each machine reaches, in Session(store=...)."
        )


def store_of_run(url: str, run_id: str, patience_s: float) -> Store | None:
    """A run's store, for what is not one of its workers; None if it was deleted, or is another run's by now.

    Raises:
        Exception: what the store's client raises.
    """
    store = Store(url, patience_s=patience_s)
    record = read_record(store) if store.exists(RECORD) else None
    if record is None or record["run_id"] != run_id:
        return None
    store.anchor(RECORD)
    return store


def tidy_store(store: Store) -> None:
    """When all workers are done: remove what processes left that were killed while they wrote it.

    These are probes, records of workers, and files of the journal's archive.
    """
    for name in store.temporary_files(""):
        store.delete(name)
    sweep_records(store)
    for run in store.list(RUNS):
        store.sweep(f"{RUNS}/{run}/{_JOURNAL}")


def delete_left_logs(store: Store, workers: int, *, keep: bool) -> None:
    """When all workers are done: delete the logs of ranks that the job has no longer.

    Whoever has a rank tidies up its log as it opens it. These ranks are nobody's: a world that was larger had
    them, and its workers ended in the middle of what they wrote.

    Args:
        workers: their number in the job.
        keep: complete segments stay, for a replay without the job.
    """
    # No listing shows a log of which not even the first segment was complete.
    uploading = (path.partition("/")[0] for path in store.abandoned_uploads(_LOG_ROOT))
    for name in sorted({*store.list(_LOG_ROOT), *uploading}):
        found = _LOG.fullmatch(name)
        if found is None or int(found[1]) < workers:
            continue
        if keep:
            store.sweep(f"{_LOG_ROOT}/{name}")
        else:
            store.delete(f"{_LOG_ROOT}/{name}", recursive=True)


def _decide(
    store: Store, context: WorkerContext, topology: dict[str, Any], settings: Mapping[str, Any]
) -> tuple[int, ...]:
    config = context.config
    record = read_record(store)
    used = record is not None and record["run_id"] != context.run_id
    if record is None and any(not name.endswith(TEMPORARY_SUFFIX) for name in store.list("")):
        raise StoreInUseError(
            f"{store.url} is not empty and holds no run of swift_ft: choose an empty folder.",
            path=store.url,
        )
    if used and not (config.resume or config.auto_resume or config.fresh):
        raise StoreInUseError(
            f"{store.url} holds run {record and record['run_id']}: continue from its last checkpoint with "
            "--resume, delete it with --fresh, or choose another store.",
            path=store.url,
        )
    if used and config.fresh:
        store.delete_all()
        record = None
    elif used and store.exists(RECORD):
        store.anchor(RECORD)  # from now on nothing is absent if this file is
    earlier: list[str] = [*record["earlier"], record["run_id"]] if used and record is not None else []
    if used and record is not None:
        # Before anything is deleted, so that a start which is refused leaves the store as it is.
        _check_topology(store, record["topology"], topology)
        tidy_store(store)
        for run in store.list(RUNS):  # at a run's own end other workers may still be writing there
            store.sweep(WorkerFiles(store, run).folder)
            store.sweep(f"{RUNS}/{run}")
        _take_over_logs(store, {*earlier})
    if record is None and config.resume:
        raise UsageError(
            f"{store.url} holds nothing to resume: omit --resume in the first run, or use --auto-resume."
        )
    written = {"run_id": context.run_id, "topology": topology, "earlier": earlier, "settings": dict(settings)}
    write_record(store, written)
    store.anchor(RECORD)  # before anything is deleted for lack of a marker
    folder = CheckpointFolder(store)
    if used:
        folder.sweep()
    checkpoints = tuple(folder.committed())
    if used and not config.fresh and not checkpoints:
        _logger.warning(
            "%s holds no committed checkpoint: training begins at iteration 0.",
            store.url,
            extra={"event": "nothing_to_resume_from"},
        )
    return checkpoints


def _check_topology(store: Store, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Whether a checkpoint can be read, and the same samples follow."""
    if differences := _differences(theirs, ours):
        raise TopologyMismatchError(
            f"The checkpoint in {store.url} was made with another topology ({differences}): "
            f"start with the same one, or choose another store.{_HINT if 'redealt' in ours else ''}",
            path=store.url,
        )


def note_topology(rendezvous: RendezvousStore, topology: Mapping[str, Any]) -> None:
    """Say what shape the world has that trains, for :func:`check_next_world`."""
    rendezvous.set(store_keys.topology(), json.dumps(topology))


def keep_topology(store: Store, run_id: str, topology: dict[str, Any]) -> None:
    """Write the shape of a next world into the record: a resumed run finds its checkpoints."""
    try:
        record = read_record(store)
        if record is not None and record["run_id"] == run_id and record["topology"] != topology:
            write_record(store, {**record, "topology": topology})
    except (SwiftError, OSError) as error:
        _logger.warning(
            "%s names the topology before the last change still: --resume may refuse the present one (%s)",
            store.url,
            first_line(error),
            extra={"event": "topology_not_kept"},
        )


def check_next_world(rendezvous: RendezvousStore, topology: dict[str, Any]) -> None:
    """Whether this worker's world can take the state of the present one over, and the same samples follow.

    Raises:
        TopologyMismatchError: it cannot.
    """
    if not rendezvous.check([store_keys.topology()]):  # nothing of the run has trained yet
        return
    theirs = json.loads(rendezvous.get(store_keys.topology()))
    if differences := _differences(theirs, topology):
        raise TopologyMismatchError(
            f"The job's state cannot be dealt anew for another topology ({differences})."
            f"{_HINT if 'redealt' in topology else ''}"
        )


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """The differences for which a state, or the order of its samples, cannot go on; empty if it can.

    Layers and ranges are read from whichever parts have them, and each replica has all of them: there may be
    more or fewer workers. Shards are ranges, in stages of a pipeline too. ``redealt`` is in the record of
    replicas, and of pipelines that may be replicas: whether their batches follow them.
    """
    same_layers = theirs.get("layers") == ours.get("layers")
    if same_layers and (theirs.get("sharded") or ours.get("sharded")):
        return ""
    if theirs.get("layers") and same_layers and theirs.get("pipelines", 1) == ours.get("pipelines", 1):
        return ""
    if theirs.get("redealt") and ours.get("redealt") and same_layers:
        return ""
    return "; ".join(
        f"{name} {theirs.get(name)} there, {ours[name]} here"
        for name in ours
        if name not in ("sharded", "redealt") and theirs.get(name) != ours[name]
    )


_HINT = (
    " A run goes on with more or fewer replicas if it began with swift_ft.data.GlobalBatches in "
    "Session(state): others would give it some samples twice."
)


def _take_over_logs(store: Store, known: set[str]) -> None:
    """Delete the logs of earlier runs, which a resumed run does not need; refuse if they are a stranger's."""
    for folder in store.list(_LOG_ROOT):
        directory = f"{_LOG_ROOT}/{folder}"
        segments = [name for name in store.list(directory) if parse_segment_name(name) is not None]
        # One is enough: a run deletes the logs of earlier ones before it writes any.
        for name in segments[:1]:
            _check_owner(store, f"{directory}/{name}", known)
        store.delete(directory, recursive=True)
    store.abort_uploads(_LOG_ROOT)  # also where no listing shows a folder


def _check_owner(store: Store, path: str, known: set[str]) -> None:
    refused: ForeignLogError | None = None
    for run_id in known:
        try:
            read_segment(store, path, run_id)
        except ForeignLogError as error:
            refused = error
        except RecoveryError:  # torn or corrupt: its owner is unknown, and it is of no use
            return
        else:
            return
    if refused is not None:
        raise StoreInUseError(
            f"The log segment {path} in {store.url} belongs to another run: move it away, or choose "
            "another store.",
            path=path,
        )
