"""Wrong use gets a clear error at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import swift_ft
from swift_ft.errors import NotLaunchedError, StoreNotWritableError, UnsupportedError, UsageError
from swift_ft.faults import Fault, check_faults, fail_at, parse_faults
from swift_ft.logging import LogBudget
from swift_ft.runtime.settings import log_options, recovery_groups
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.comm_errors import is_broken_communication


def parts() -> dict[str, object]:
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def test_without_the_launcher() -> None:
    with pytest.raises(NotLaunchedError, match="swift-run --standalone"):
        swift_ft.Session(parts(), store="memory://nowhere")


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        ({}, {}, "nothing to protect"),
        ({"model": object()}, {}, "no state_dict"),
        ([torch.nn.Linear(2, 2)], {}, "takes what it protects by name.*not a list"),
        (parts(), {"store": None}, "store takes a URL or a path .* not None"),
        (
            parts(),
            {"storee": "x"},
            r"got an unexpected keyword argument 'storee'\. Its arguments are: state, store,",
        ),
        (parts(), {"checkpoint_every": 0}, "at least 1"),
        (parts(), {"checkpoint_every": "10"}, "checkpoint_every must be a whole number, not '10'"),
        (parts(), {"keep_checkpoints": 0}, "at least 1"),
    ],
)
def test_arguments_without_sense(state: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        swift_ft.Session(state, **{"store": "memory://nowhere", **options})


def test_an_optimizer_that_keeps_a_part_of_its_state_elsewhere() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """As in torch.distributed.optim, which needs a process group."""

    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": ZeroRedundancyOptimizer(model.parameters())}
    with pytest.raises(UnsupportedError, match=r"'optimizer' is a ZeroRedundancyOptimizer.*that it wraps"):
        swift_ft.Session(state, store="memory://nowhere")


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(UsageError, match=r"Session\(\): missing a required.*argument: 'store'"):
        swift_ft.Session(parts())  # type: ignore[call-arg]


def test_a_session_is_no_loop() -> None:
    session = object.__new__(swift_ft.Session)
    with pytest.raises(UsageError, match=r"for step in session\.steps\(iterations\)"):
        iter(session)


@pytest.mark.parametrize("budget", ["4GB", 4_000_000_000])
def test_a_budget_may_be_a_text(budget: int | str) -> None:
    options = log_options(budget, "always", None, "auto", workers=2)
    assert options.budget == LogBudget(2_000_000_000, 2_000_000_000)
    with pytest.raises(UsageError, match="'much' is not an amount of bytes"):
        log_options("much", "always", None, "auto", workers=2)
    with pytest.raises(UsageError, match="log_budget_bytes takes bytes, such as '4GB'"):
        log_options(None, "always", None, "auto", workers=2)  # type: ignore[arg-type]


PLAIN = """
import torch
import torch.distributed as dist
import swift_ft
{before}
model = torch.nn.Linear(2, 2)
swift_ft.Session({{"model": model}}, store="runs/x")
"""


@pytest.mark.parametrize("before", ["", "dist.init_process_group('gloo')"])
def test_plain_python_ends_with_one_line(before: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN.format(before=before))
    unset = ("RANK", "WORLD_SIZE", "SWIFT_CONTEXT")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "swift_ft: A swift_ft.Session needs the launcher: start the script with `swift-run"
    )


def test_plain_python_hides_no_other_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import swift_ft\nraise ValueError('of the script')\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: of the script" in done.stderr


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill machine=9 iteration=1", "there is no machine 9, only machines 0 to 1"),
        ("kill worker=4 iteration=1", "there is no worker 4, only workers 0 to 3"),
        ("kill machine=-1 iteration=1", "there is no machine -1"),
    ],
)
def test_faults_of_what_is_not_there(fault: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_faults(fault, machines=2, workers_per_machine=2)
    check_faults("kill machine=1 iteration=1; stop worker=3 iteration=1", machines=2, workers_per_machine=2)


def test_store_of_an_unknown_kind() -> None:
    with pytest.raises(StoreNotWritableError):
        Store("gopher://hole/run")


def test_a_users_exception_is_no_peers_death() -> None:
    def loss_fn() -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:15788")

    with pytest.raises(RuntimeError) as caught:
        loss_fn()
    assert not is_broken_communication(caught.value)


def test_faults_read_what_they_print() -> None:
    fault = fail_at(machine=1, iteration=47, point="forward", microbatch=3)
    text = "kill machine=1 iteration=47 point=forward microbatch=3"
    assert str(fault) == text
    both = parse_faults(f"{text}; stop worker=2 iteration=50 point=optimizer")
    assert both[0] == fault
    assert isinstance(both[1], Fault)
    assert parse_faults(" ; ".join(map(str, both))) == both
    (late,) = parse_faults(f"{text} committed=45")
    assert late == fail_at(machine=1, iteration=47, point="forward", microbatch=3, committed=45)
    assert str(late) == f"{text} committed=45"


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill machine=x iteration=1",
        "melt machine=1 iteration=1",
        "kill machine=1 iteration=1 where=here",
    ],
)
def test_faults_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        parse_faults(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ship": "sometimes"}, r"ship must be one of 'always', 'on-failure', not 'sometimes'"),
        ({"compress": "yes"}, r"compress must be one of 'auto', 'never', 'always', not 'yes'"),
        (
            {"budget": 4 << 20, "workers": 8},
            r"gives a worker 524288 bytes of memory: it needs at least 1 MiB",
        ),
        ({"budget": LogBudget(disk_bytes=1000)}, r"gives a worker 1000 bytes of disk"),
    ],
)
def test_invalid_options_of_the_log_are_reported(arguments: dict[str, Any], message: str) -> None:
    options = {"budget": LogBudget(), "ship": "always", "local": None, "compress": "auto", "workers": 1}
    with pytest.raises(UsageError, match=message):
        log_options(**{**options, **arguments})


def test_a_plain_budget_is_for_memory_and_disk(tmp_path: Path) -> None:
    options = log_options(8 << 20, "on-failure", tmp_path, "never", 2)
    assert options.budget == LogBudget(4 << 20, 4 << 20)
    assert options.local == tmp_path


@pytest.mark.parametrize("groups", [[[0, 1], [1, 2]], [[0], [1]], [[0], [1], [2], [3]]])
def test_groups_name_every_machine_once(groups: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="groups must name each of the 3 machines once, 0 to 2"):
        recovery_groups(groups, 3)


def test_the_group_of_each_machine(tmp_path: Path) -> None:
    assert recovery_groups(None, 3) == (0, 1, 2)
    assert recovery_groups([[2, 0], [1]], 3) == (0, 1, 0)
    (tmp_path / "groups.json").write_text('{"groups": [[0], [1, 2]]}')
    assert recovery_groups(tmp_path / "groups.json", 3) == (0, 1, 1)
    (tmp_path / "groups.json").write_text('{"groups": 3}')
    with pytest.raises(UsageError, match="has no list of lists 'groups'"):
        recovery_groups(tmp_path / "groups.json", 3)
