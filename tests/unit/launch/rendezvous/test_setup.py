"""What a script is given, by name: another value is another fact, and what is of a machine is none."""

from __future__ import annotations

import pytest

from swift_ft.launch.rendezvous.setup import argument_facts, environment_facts


@pytest.mark.parametrize(
    ("one", "other", "differing"),
    [
        (["--lr", "0.1"], ["--lr", "0.2"], {"the script's --lr"}),
        (["--lr=0.1"], ["--lr", "0.1"], set()),
        (["run", "--amp"], ["run"], {"the script's --amp"}),
        (["run", "7"], ["run", "8"], {"the script's argument 2"}),
        (["--x", "1", "--x", "2"], ["--x", "1", "--x", "3"], {"the script's --x (2)"}),
        (["--bias", "-1"], ["--bias", "-2"], {"the script's --bias"}),
        (["--local_rank=0"], ["--local-rank", "1"], set()),
        (["--data", "/a", "--lr", "1"], ["--data", "/b", "--lr", "1"], set()),
        (["--cache_dir", "/a"], ["--cache_dir", "/b"], set()),
        (["--url", "s3://u:a@h"], ["--url", "s3://u:b@h"], {"the script's --url"}),
    ],
)
def test_arguments(one: list[str], other: list[str], differing: set[str]) -> None:
    ours, theirs = (argument_facts(args, ("data", "--cache-dir")) for args in (one, other))
    assert {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)} == differing
    assert not any("@" in value for value in ours.values())


def test_environment() -> None:
    env = {
        "OMP_NUM_THREADS": "4",
        "LR": "0.1",
        "UNREAD": "1",
        "HF_TOKEN": "secret",
        "HOSTNAME": "a",
        "SLURM_NODEID": "1",
        "LOCAL_RANK": "0",
        "SCRATCH": "/a",
    }
    read = ["LR", "HF_TOKEN", "HOSTNAME", "SLURM_NODEID", "LOCAL_RANK", "SCRATCH", "MISSING"]
    assert environment_facts(read, ("SCRATCH",), env) == {
        "the variable LR": "0.1",
        "the variable MISSING": "not set",
        "the variable OMP_NUM_THREADS": "4",
    }
