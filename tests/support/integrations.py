"""Runs an example of an integration undisturbed and with a kill, and compares what the runs saved."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from swift_ft.checkpoint.state_values import digests_of
from swift_ft.offline.part_comparison import differences, find_parts, read_part
from tests.support.cluster import EXAMPLES, ClusterRun, run_cluster

ITERATIONS, CHECKPOINT_EVERY = 8, 4


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips tests, with the reason, where a package of the extra ``integrations`` is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    remedy = "pip install 'swift-ft[integrations]'"
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed: {remedy}")


def train(
    folder: Path, example: str, *args: str, inject: str = "", machines: int = 4, helpers: int = 0
) -> ClusterRun:
    """Runs an example for a few iterations, with a spare. The last checkpoint holds its final state.

    Args:
        folder: of the run; its store is in it.
        example: path below ``examples/``.
        args: further arguments of the script.
        inject: faults.
        machines: that take part from the beginning.
        helpers: survivors that may help in a replay, at most.
    """
    script = [str(EXAMPLES / example), "--store", str(folder / "store"), *args]
    script += ["--iterations", str(ITERATIONS), "--checkpoint-every", str(CHECKPOINT_EVERY)]
    flags = ["--helpers", str(helpers)]
    run = run_cluster(folder, inject=inject, machines=machines, flags=flags, script=script)
    assert run.code == 0, run.output[-6000:]
    return run


def assert_same_state(run: ClusterRun, reference: ClusterRun) -> None:
    """Checks that all workers ended with the state of an undisturbed run, bit for bit.

    That is all of ``Session(state)``: parameters, buffers, states of optimizers, and the small objects.
    """
    ours, theirs = (find_parts(f"{one.store}/checkpoints/{ITERATIONS:08d}") for one in (run, reference))
    assert ours.keys() == theirs.keys()
    for rank in sorted(theirs, key=str):
        state, expected = (read_part(*parts[rank]) for parts in (ours, theirs))
        assert any(name != "plain.bytes" for name in expected)
        different = differences(
            state, expected, of_replica=True
        )  # the process's own random state is left out
        assert not different, f"{different[:5]} of worker {rank} differ:\n{run.output[-3000:]}"


def assert_same_files(run: ClusterRun, reference: ClusterRun, *, but: tuple[str, ...] = ()) -> None:
    """Checks what each worker wrote with ``--out``, bit for bit: a checkpoint holds one replica only.

    Args:
        run: its files.
        reference: the files that they should be like.
        but: parts of the names of values that are not compared.
    """
    ours, theirs = ({path.name: path for path in (one.folder / "out").iterdir()} for one in (run, reference))
    assert ours.keys() == theirs.keys()
    assert theirs
    for name in theirs:
        assert_same_file(run, reference, name, but=but)


def assert_same_file(run: ClusterRun, reference: ClusterRun, name: str, *, but: tuple[str, ...] = ()) -> None:
    """Checks one of them."""
    files = (one.folder / "out" / name for one in (run, reference))
    state, expected = (digests_of(torch.load(file, weights_only=True)) for file in files)
    assert state.keys() == expected.keys()
    compared = [key for key in expected if not any(part in key for part in but)]
    different = [key for key in compared if state[key] != expected[key]]
    assert compared
    assert not different, f"{different[:5]} of {name} differ:\n{run.output[-3000:]}"
