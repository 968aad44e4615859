"""Integrations with pipelines: each example loses a machine, and ends like an undisturbed run to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import EXAMPLES, KILLS_OTHERS, ClusterRun, at_once, once
from tests.support.integrations import assert_same_state, needs, train

Reference = Callable[..., ClusterRun]

HYBRID = ("--layers=4", "--width=32", "--heads=2", "--sequence=32", "--microbatch-size=1", "--microbatches=4")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs of examples."""
    return once(tmp_path_factory, train)


@needs("transformers")
@pytest.mark.parametrize(
    ("fault", "helpers"),
    [
        ("machine=0 iteration=6 point=forward microbatch=2", 3),  # the last stage has its embedding, too
        ("machine=2 iteration=6 point=optimizer", 0),
    ],
)
@pytest.mark.thorough
def test_gpt2_cut_by_hand(fault: str, helpers: int, tmp_path: Path, undisturbed: Reference) -> None:
    run = train(tmp_path, "integrations/gpt2_stages.py", inject=f"kill {fault}", helpers=helpers)
    assert_same_state(run, undisturbed("integrations/gpt2_stages.py"))
    (recovery,) = run.recoveries
    assert (recovery["mode"], len(recovery["helpers"])) == ("replay", helpers)


@needs("transformers")
@pytest.mark.parametrize(
    "fault",
    [
        "machine=0 iteration=6 point=forward microbatch=2",
        "machine=3 iteration=6 point=backward microbatch=1",  # its mask comes from the first stage
    ],
)
def test_gpt2_cut_by_the_tracer(fault: str, tmp_path: Path, undisturbed: Reference) -> None:
    run = train(tmp_path, "integrations/gpt2_traced.py", inject=f"kill {fault}")
    assert_same_state(run, undisturbed("integrations/gpt2_traced.py"))
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]


@needs("transformers")
@pytest.mark.thorough
def test_both_ends_of_a_connection_that_skips_a_stage(
    tmp_path: Path, undisturbed: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask that stage 2 needs was in the log of stage 0. So they replay together."""
    folders = [os.environ["PYTHONPATH"], str(EXAMPLES / "integrations")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.setenv("KILLS", at_once(0, 2, by=1, iteration=6, example="gpt2_traced"))
    run = train(tmp_path, str(KILLS_OTHERS))
    assert_same_state(run, undisturbed("integrations/gpt2_traced.py"))
    (recovery,) = run.recoveries
    assert (recovery["mode"], sorted(recovery["slots"])) == ("replay", [0, 2])
    groups = {rank: task.replay_group for rank, task in run.last_plan().tasks.items() if task.replay_group}
    assert groups == {0: (0, 2), 2: (0, 2)}


@needs("transformers")
@pytest.mark.parametrize(
    ("fault", "helpers"),
    [
        ("machine=3 iteration=6 point=backward microbatch=1", 3),  # iteration 4 has validated
        ("machine=1 iteration=5 point=optimizer", 0),  # the others have its norm, and are ahead
    ],
)
def test_llama(fault: str, helpers: int, tmp_path: Path, undisturbed: Reference) -> None:
    run = train(tmp_path, "integrations/llama.py", inject=f"kill {fault}", helpers=helpers)
    assert_same_state(run, undisturbed("integrations/llama.py"))
    (recovery,) = run.recoveries
    assert (recovery["mode"], len(recovery["helpers"])) == ("replay", helpers)


def test_replicated_pipelines(tmp_path: Path, undisturbed: Reference) -> None:
    """More faults, in which all replicas of a stage are lost as well, are in `test_hybrid.py`."""
    run = train(
        tmp_path, "train_hybrid.py", *HYBRID, inject="kill machine=2 iteration=6 point=forward microbatch=1"
    )
    assert_same_state(run, undisturbed("train_hybrid.py", *HYBRID))
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"]
