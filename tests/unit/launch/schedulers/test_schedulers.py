"""What is asked of a scheduler's tools: stand-ins on the PATH note how they are called."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft.errors import SchedulerError, UsageError
from swift_ft.launch.schedulers.choice import check_scheduler, scheduler_of
from swift_ft.launch.schedulers.command import CommandScheduler
from swift_ft.launch.schedulers.jobset import JobSetScheduler
from swift_ft.launch.schedulers.scheduler import RunPlace, run_tool
from swift_ft.launch.schedulers.slurm import SlurmScheduler

PLACE = RunPlace(
    "run7.1-0a1b", "node0:29400", ("python", "-m", "swift_ft.cli.run", "train.py", "--note", "a b")
)

Tool = Callable[..., Callable[[], list[list[str]]]]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts a stand-in on the PATH: it notes its arguments, and runs the lines of a shell script."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def make(name: str, script: str = "") -> Callable[[], list[list[str]]]:
        path, calls = tmp_path / name, tmp_path / f"{name}.calls"
        note = f'for word in "$@"; do printf "%s\\0" "$word"; done >>{calls}; printf "\\n" >>{calls}'
        path.write_text(f"#!/bin/sh\n{note}\n{script}\n")
        path.chmod(0o755)

        def called() -> list[list[str]]:
            lines = calls.read_text().splitlines() if calls.exists() else []
            return [line.split("\0")[:-1] for line in lines]

        return called

    return make


def test_slurm_is_asked_for_a_job_of_each_machine(tool: Tool) -> None:
    sbatch = tool("sbatch", "echo Submitted batch job 12")
    environ = {
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_ACCOUNT": "",
        "SWIFT_SBATCH": "--gpus=8 --time '1:00:00'",
    }
    SlurmScheduler(PLACE, environ).ask(2, "no machine fills slots 1 and 2")
    first, second = sbatch()
    assert first == second
    assert first[-2:] == ["--wrap", shlex.join(PLACE.launch)]
    assert {
        "--nodes=1",
        "--partition=gpu",
        "--gpus=8",
        "--time",
        "1:00:00",
        "--export=ALL,PET_NODE_RANK=",
    } <= {*first}
    assert first[first.index("--comment") + 1] == "no machine fills slots 1 and 2"
    assert not [word for word in first if word.startswith("--account")]


@pytest.mark.parametrize(
    ("sinfo", "excluded"), [("printf 'node1\\nnode7\\nnode7\\n'", ["--exclude=node7"]), ("exit 1", [])]
)
def test_slurm_is_told_which_nodes_are_left_out(sinfo: str, excluded: list[str], tool: Tool) -> None:
    """Only those that it knows by these names: it would refuse the job otherwise."""
    tool("sinfo", sinfo)
    sbatch = tool("sbatch")
    SlurmScheduler(PLACE, {}).ask(1, "no machine fills slot 1", ["node7", "node9-repaired"])
    (words,) = sbatch()
    assert [word for word in words if word.startswith("--exclude=")] == excluded


def slurm(node: str, number: int = 1) -> SlurmScheduler:
    environ = {"SLURM_JOB_ID": "4711", "SLURMD_NODENAME": node, "SLURM_NODEID": str(number)}
    return SlurmScheduler(PLACE, environ)


def test_a_node_leaves_its_slurm_job(tool: Tool) -> None:
    squeue = tool("squeue", "echo 'node[1-3]'")
    scontrol = tool("scontrol", '[ "$1" = show ] && printf "node1\\nnode2\\nnode3\\n"; exit 0')
    slurm("node2").give_back(["m-1.0"])
    assert squeue() == [["--noheader", "--jobs", "4711", "--format", "%N"]]
    assert scontrol() == [
        ["show", "hostnames", "node[1-3]"],
        ["update", "JobId=4711", "NodeList=node1,node3"],
    ]


def test_a_slurm_job_of_one_node_ends_by_itself_and_the_first_node_stays(tool: Tool) -> None:
    tool("squeue", "echo node1")
    scontrol = tool("scontrol", "echo node1")
    slurm("node1", 0).give_back(["m-1.0"])
    assert len(scontrol()) == 1
    tool("scontrol", 'printf "node1\\nnode2\\n"')
    with pytest.raises(SchedulerError, match="node1 is the first node of job 4711"):
        slurm("node1", 0).give_back(["m-1.0"])
    with pytest.raises(SchedulerError, match="no task of a Slurm job"):
        SlurmScheduler(PLACE, {}).give_back(["m-1.0"])


def test_a_job_of_kubernetes_gets_more_pods(tool: Tool) -> None:
    job = json.dumps({"spec": {"parallelism": 5, "completions": 5}})
    kubectl = tool("kubectl", f"[ $1 = get ] && echo {shlex.quote(job)}; exit 0")
    scheduler = JobSetScheduler({"JOB_NAME": "swift-train-machine-0"})
    scheduler.ask(2, "no machine fills slots 1 and 2")
    scheduler.give_back(["m-1.0"])
    get, patch = kubectl()
    assert get == ["get", "job", "swift-train-machine-0", "--output", "json"]
    assert patch[:4] == ["patch", "job", "swift-train-machine-0", "--type=merge"]
    assert json.loads(patch[-1]) == {"spec": {"parallelism": 7, "completions": 7}}


def test_a_job_of_kubernetes_that_is_not_known(tool: Tool) -> None:
    with pytest.raises(SchedulerError, match="JOB_NAME is not set"):
        JobSetScheduler({}).ask(1, "")
    tool("kubectl", "echo '{}'")
    with pytest.raises(SchedulerError, match="kubectl says nothing of the pods of Job j"):
        JobSetScheduler({"JOB_NAME": "j"}).ask(1, "")


def test_a_command_is_told_everything(tmp_path: Path, tool: Tool) -> None:
    names = ("COUNT", "REASON", "EXCLUDE", "MACHINES", "RUN", "ENDPOINT", "LAUNCH")
    script = "\n".join(f'echo "{name}=$SWIFT_{name}" >>{tmp_path}/facts' for name in names)
    mine = tool("mine", script)
    scheduler = CommandScheduler("mine --pool 'big one'", PLACE)
    scheduler.ask(2, "no machine fills slots 1 and 2", ["node7", "node8"])
    scheduler.give_back(["m-1.0"])
    assert mine() == [["--pool", "big one", "ask"], ["--pool", "big one", "give-back"]]
    place = ["RUN=run7.1-0a1b", "ENDPOINT=node0:29400", f"LAUNCH={shlex.join(PLACE.launch)}"]
    assert (tmp_path / "facts").read_text().splitlines() == [
        *("COUNT=2", "REASON=no machine fills slots 1 and 2", "EXCLUDE=node7 node8", "MACHINES=", *place),
        *("COUNT=1", "REASON=", "EXCLUDE=", "MACHINES=m-1.0", *place),
    ]


def test_failures_are_one_line(tool: Tool) -> None:
    with pytest.raises(SchedulerError, match="there is no sbatch-that-is-not-there on this host"):
        run_tool(["sbatch-that-is-not-there"])
    tool("broken", "echo first >&2; echo 'Invalid partition' >&2; exit 3")
    with pytest.raises(SchedulerError, match="broken ended with exit code 3: Invalid partition"):
        run_tool(["broken"])
    tool("slow", "exec sleep 60")
    with pytest.raises(SchedulerError, match=r"slow was killed after 0\.2 s"):
        run_tool(["slow"], limit_s=0.2)


@pytest.mark.parametrize("name", ["slurm", "jobset", "command:submit --now"])
def test_schedulers_by_name(name: str) -> None:
    check_scheduler(name)
    assert isinstance(scheduler_of(name, PLACE), SlurmScheduler | JobSetScheduler | CommandScheduler)


@pytest.mark.parametrize("name", ["pbs", "slurm:", "command", "command:", "command: ", "command:'open"])
def test_a_scheduler_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="choose slurm, jobset, or command:COMMAND"):
        check_scheduler(name)
