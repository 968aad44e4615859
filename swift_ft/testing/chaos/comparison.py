"""Digests of all that a run has computed: its last checkpoint, and the files that its script wrote."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.state_payload import unpack
from swift_ft.checkpoint.state_values import OF_ONE_RUN, RANDOM, VARIABLES, digests, is_in, leaves
from swift_ft.errors import SwiftError
from swift_ft.recovery.job_state import SavedPart
from swift_ft.storage.own_files import is_own, is_own_folder
from swift_ft.storage.store import Store
from swift_ft.testing.chaos.run_folder import FOLDER, OWN, store_in

UNDO_BOUND = 1e-5
"""The largest difference after an undo that is not exact, as :func:`largest_difference` measures it.

The undo itself errs by a few units in the last place (docs/undo.md), and the iterations that follow go on
from there.
"""

_SAVER = re.compile(r"/rank-(\d{5})\.")
"""In the path of a part."""


def files_of(folder: Path) -> dict[str, str]:
    """All that a script wrote into its run's folder, also beside what is in the store.

    Returns:
        a digest of each file, the target of each link, and which folders are empty (their names end with a
        slash).
    """
    store = store_in(folder)
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        is_ours = inside.parts[0] == OWN or (store is not None and _is_of(store, path))
        if is_ours or "__pycache__" in inside.parts:
            continue
        if path.is_symlink():
            target = str(path.readlink())
            for place in (folder.resolve(), folder):
                target = target.replace(str(place), FOLDER)
            found[f"file {inside}"] = f"-> {target}"
        elif path.is_file():
            found[f"file {inside}"] = xxhash.xxh3_128_hexdigest(path.read_bytes())
        elif path.is_dir() and not any(path.iterdir()):
            found[f"file {inside}/"] = "an empty folder"
    return found


def _is_of(store: str, path: Path) -> bool:
    """Whether swift_ft has written a file into its store, or made a folder there."""
    if not path.is_relative_to(store):
        return False
    name = path.relative_to(store).as_posix()
    return is_own_folder(name) if path.is_dir() and not path.is_symlink() else is_own(name)


def last_state(url: str, iteration: int | None = None) -> dict[str, str]:
    """A digest of each value in the last checkpoint of a store, by rank and name. Empty without a checkpoint.

    The random state of the process is left out: a script need not seed what it does not use, and steps have
    random state of their own.

    Args:
        url: the store's.
        iteration: of an earlier checkpoint, to take that one. Empty if it is not there.

    Raises:
        SwiftError: it cannot be read.
    """
    if (found := _checkpoint(url, iteration)) is None:
        return {}
    folder, taken = found
    return {"iteration": str(taken), **digests(_values(folder, taken))}


def without_repeated(state: Mapping[str, str], expected: Mapping[str, str]) -> dict[str, str]:
    """Leave out workers that have saved what another one has, where undisturbed ones share a part.

    So may replicas, if one is lost in the last checkpoint. Variables of the script are each one's own.

    Args:
        state: as :func:`last_state`.
        expected: as for the undisturbed run.
    """

    def of_workers(found: Mapping[str, str]) -> dict[str, dict[str, str]]:
        by_worker: dict[str, dict[str, str]] = {}
        for name, digest in found.items():
            worker, _, rest = name.partition(".")
            if worker.startswith("worker ") and not is_in(rest, (VARIABLES,)):
                by_worker.setdefault(worker, {})[rest] = digest
        return by_worker

    here, there = of_workers(state), of_workers(expected)
    shared = [values for worker, values in here.items() if worker in there]
    repeated = {worker for worker, values in here.items() if worker not in there and values in shared}
    return {name: digest for name, digest in state.items() if name.partition(".")[0] not in repeated}


def _checkpoint(url: str, iteration: int | None) -> tuple[CheckpointFolder, int] | None:
    """The folder, and the iteration of the last checkpoint or of the given one; None if it is not there."""
    folder = CheckpointFolder(Store(url))
    committed = folder.committed()
    taken = committed[-1] if iteration is None and committed else iteration
    return None if taken is None or taken not in committed else (folder, taken)


def newest_intact(url: str, *, committed: int | None = None, damaged: Collection[str] = ()) -> int | None:
    """The iteration of the last checkpoint of a store that can be read, all parts of it.

    A checkpoint that cannot be read, or is gone, is passed over if a fault has damaged it.

    Args:
        url: the store's.
        committed: the iteration of the last one, as the run's journal has it; None if it does not tell.
        damaged: files that faults have damaged, by their paths in the store.

    Returns:
        None if faults have damaged all that there were.

    Raises:
        SwiftError: a later one cannot be read, and no fault has damaged it; or there was none at all.
    """
    folder = CheckpointFolder(Store(url))
    there = folder.committed()

    def is_damaged(iteration: int) -> bool:
        place = folder.part(iteration, 0, 0).rpartition("/")[0]
        return any(path.startswith(f"{place}/") for path in damaged)

    if committed is not None and committed not in there and not is_damaged(committed):
        raise SwiftError(f"the checkpoint of iteration {committed} is gone, and no fault has struck it")
    if committed is None and not there:
        raise SwiftError("there is no checkpoint")
    for iteration in reversed(there):
        try:
            for _ in _values(folder, iteration):
                pass
        except SwiftError:
            if not is_damaged(iteration):
                raise
        else:
            return iteration
    return None


def largest_difference(url: str, other_url: str, names: Sequence[str], iteration: int | None = None) -> float:
    """The largest difference of values of a last checkpoint from those of an undisturbed run's.

    It is relative to the largest element of all tensors of its kind: those of the models, or one kind of an
    optimizer's. What is noise beside the others in one run is other noise in the next, and Adam makes whole
    steps of it. A number of Python is as a tensor of one element. Infinite where a value is missing, is
    something else, or is not finite.

    Args:
        url: the store with the checkpoint.
        other_url: that of the undisturbed run.
        names: those of the values to compare.
        iteration: of the checkpoints, where they are not the last ones.
    """
    ours, theirs = (dict(_values_of(one, iteration)) for one in (url, other_url))
    largest: dict[str, float] = {}
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout == torch.strided:
            finite = value[value.isfinite()].abs()  # a mask may have others
            if finite.numel():
                largest[_kind(name)] = max(largest.get(_kind(name), 0.0), finite.max().item())
    differences = [(_difference(ours.get(name), theirs.get(name)), name) for name in names]
    return max((_relative(found, largest.get(_kind(name))) for found, name in differences), default=0.0)


def _kind(name: str) -> str:
    """The kind of a tensor: of a worker's models, or as one kind of its optimizers' state is called."""
    worker, _, rest = name.partition(".")
    if rest.startswith("models."):
        return f"{worker}.models"
    return f"{worker}.optimizers {name.rpartition('.')[2]}" if rest.startswith("optimizers.") else name


def _relative(found: tuple[float, float], largest: float | None) -> float:
    difference, scale = found
    relative = difference / (largest or scale) if difference else 0.0
    return relative if math.isfinite(relative) else math.inf  # NaN is neither larger nor smaller than a bound


def are_finite(url: str, other_url: str, names: Sequence[str], iteration: int | None = None) -> bool:
    """Whether tensors of a checkpoint are finite, and but for their numbers as those of another store's."""
    ours, theirs = (dict(_values_of(one, iteration)) for one in (url, other_url))
    return all(_is_finite(ours.get(name), theirs.get(name)) for name in names)


def _is_finite(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if not tensors or (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    return bool(one.isfinite().all())


def _difference(one: Any, other: Any) -> tuple[float, float]:
    """The largest difference of two tensors, and the largest element of both."""
    if isinstance(one, float) and isinstance(other, float):
        one, other = (torch.tensor(value, dtype=torch.float64) for value in (one, other))
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if not tensors or one.layout != other.layout or one.layout != torch.strided:
        return math.inf, 1.0
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return math.inf, 1.0
    if not one.numel():
        return 0.0, 1.0
    scale = max(one.abs().max().item(), other.abs().max().item())
    return (one.double() - other.double()).abs().max().item(), scale


def _values_of(url: str, iteration: int | None) -> Iterator[tuple[str, Any]]:
    """The values of a checkpoint, or of the last one."""
    if (found := _checkpoint(url, iteration)) is not None:
        yield from _values(*found)


def _values(folder: CheckpointFolder, iteration: int) -> Iterator[tuple[str, Any]]:
    """Each value that was saved, but for what is of one process or one run."""
    for rank, part in _parts(folder, iteration):
        worker = f"worker {rank}"
        for name, value in leaves(_opened(folder.reader(part).read()), worker):
            if not is_in(name.removeprefix(f"{worker}."), (RANDOM, *OF_ONE_RUN)):
                yield name, value


def _parts(folder: CheckpointFolder, iteration: int) -> Collection[tuple[int, SavedPart]]:
    """Each part, with the worker whose name its values have: of replicas, which share one, the first."""
    parts: dict[str, tuple[int, SavedPart]] = {}
    for rank, part in sorted(folder.parts_of(iteration).items()):
        parts.setdefault(part.path, (rank, part))
    return parts.values()


def names_by_saver(url: str, iteration: int | None = None) -> dict[int, str]:
    """The name that the values of a part have, by the rank of the worker whose state it is.

    Args:
        url: the store's.
        iteration: of the checkpoint, where it is not the last one.
    """
    if (found := _checkpoint(url, iteration)) is None:
        return {}
    savers = ((_SAVER.search(part.path), rank) for rank, part in _parts(*found))
    return {int(saver[1]): f"worker {rank}." for saver, rank in savers if saver is not None}


def _opened(part: Any) -> Any:
    """A part with the plain values that are packed in it."""
    if isinstance(part, Mapping):
        return {key: _opened(value) for key, value in part.items()}
    if not isinstance(part, io.BytesIO):
        return part
    plain = unpack(part.getvalue())
    if not plain["carried"]:  # no variable: that there is a place for some is none
        del plain["carried"]
    return plain
