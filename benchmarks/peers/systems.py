"""What is compared, and how each is started: one launcher for each machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.peers.cells import MACHINES, Case, Place, Start, System

_TORCHFT_TIMEOUT_S = 1.0
_HEARTBEAT_S = 3.0
_GLOO_TIMEOUT_S = 5.0
_DLROVER_FOLDERS = ("/tmp/ckpt_sock", "/tmp/dlrover", "/dev/shm")
_KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=3"
"""torchrun's own is 5 s: with it, a lost machine is missed after 15 s."""
_AT_ONCE = ("--elastic-wait", "0")
"""No machine is waited for: its own is 10 s."""


def _torchrun(number: int, case: Case, place: Place, words: list[str]) -> Start:
    flags = ["--nnodes", str(MACHINES), "--nproc-per-node", "1", "--max-restarts", "3"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{place.port}", "--rdzv-id", "peers"]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, *meeting]
    command += ["--rdzv-conf", _KEEP_ALIVE, "--local-addr", "127.0.0.1", *words]
    # Without the variable, restarts hang now and then.
    return Start(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, meets=number == 0)


def _dcp(number: int, case: Case, place: Place, words: list[str]) -> Start:
    more = ["--store", str(place.store), "--checkpoint-every", str(case.checkpoint_every)]
    return _torchrun(number, case, place, [*words, *more])


def _swift(number: int, case: Case, place: Place, words: list[str], more: Sequence[str] = ()) -> Start:
    flags = ["--nnodes", str(MACHINES), "--rdzv-endpoint", f"127.0.0.1:{place.port}", "--rdzv-id", "peers"]
    flags += more
    command = [sys.executable, "-m", "swift_ft.cli.run", *flags]
    command += ["--log-dir", str(place.folder / f"logs{number}"), *words]
    command += ["--store", str(place.store), "--checkpoint-every", str(case.checkpoint_every)]
    return Start(command, meets=number == 0)


def _torchft(timeout_s: float | None) -> System:
    def machine(number: int, case: Case, place: Place, words: list[str]) -> Start:
        more = ["--replica", str(number), "--replicas", str(MACHINES)]
        more += ["--timeout", str(timeout_s)] if timeout_s is not None else []
        more += ["--fixed"] if case.failure == "spare" else []
        flags = ["--standalone", "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "3"]
        command = [sys.executable, "-m", "torch.distributed.run", *flags, *words, *more]
        return Start(command, {"TORCHFT_LIGHTHOUSE": f"http://localhost:{place.port}"})

    def lighthouse(place: Place) -> Start:
        program = str(Path(sys.executable).parent / "torchft_lighthouse")
        command = [program, "--bind", f"[::]:{place.port}", "--min_replicas", "1"]
        if timeout_s is not None:
            milliseconds = str(round(1000 * timeout_s))
            command += ["--heartbeat_timeout_ms", milliseconds, "--join_timeout_ms", milliseconds]
        return Start(command, meets=True)

    return System(
        "torchft" if timeout_s is None else f"torchft, timeouts of {timeout_s:.0f} s",
        {"data": "data_torchft.py"},
        machine,
        lighthouse,
        {
            "pipeline": "no: it protects replicas, and one pipeline has none",
            "hsdp": "not measured: the loss of one machine restarts both of a replica of two",
        },
        elastic=True,
        needs=("torchft", "0.2.0"),
        settings="as they are"
        if timeout_s is None
        else f"those of Manager, process group, heartbeats and joining: {timeout_s:.0f} s; a quorum: 60 s "
        "(with 1 s, all survivors gave up in some runs, and the job began from nothing)",
        fails={
            "its DDP": "with gloo, survivors fail an assertion in its communication hook; here it is patched"
        }
        if timeout_s is None
        else {},
    )


def _nvrx(number: int, case: Case, place: Place, words: list[str]) -> Start:
    more = ["--store", str(place.store), "--checkpoint-every", str(case.checkpoint_every)]
    more += ["--workers", str(MACHINES), "--heartbeat-timeout", str(_HEARTBEAT_S)]
    more += ["--gloo-timeout", str(_GLOO_TIMEOUT_S)]
    env = {"RANK": str(number), "WORLD_SIZE": str(MACHINES + (case.failure == "spare"))}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port)}
    return Start([sys.executable, *words, *more], env)


def _dlrover(number: int, case: Case, place: Place, words: list[str]) -> Start:
    program = str(Path(sys.executable).parent / "dlrover-run")
    more = ["--store", str(place.store), "--checkpoint-every", str(case.checkpoint_every)]
    flags = [f"--nnodes={MACHINES}", "--nproc_per_node=1", "--max_restarts=3"]
    # Its agents use fixed names for sockets and shared memory: each machine needs its own.
    own = " && ".join(f"mkdir -p {at} && mount -t tmpfs tmpfs {at}" for at in _DLROVER_FOLDERS)
    inner = shlex.join([program, *flags, *words, *more])
    master = f"127.0.0.1:{place.port}"
    env = {"DLROVER_MASTER_ADDR": master, "NODE_ID": str(number), "NODE_RANK": str(number)}
    return Start(["unshare", "--mount", "sh", "-c", f"{own} && exec {inner}"], env)


def _dlrover_master(place: Place) -> Start:
    command = [
        sys.executable,
        "-m",
        "dlrover.python.master.main",
        "--platform",
        "local",
        "--job_name",
        "peers",
    ]
    return Start([*command, "--port", str(place.port), "--node_num", str(MACHINES)], meets=True)


PLAIN = System(
    "plain PyTorch",
    {"data": "data_plain.py", "pipeline": "pipeline_plain.py", "hsdp": "hsdp_plain.py"},
    _torchrun,
)
SWIFT = System(
    "swift_ft",
    {"data": "data_swift.py", "pipeline": "pipeline_swift.py", "hsdp": "hsdp_swift.py"},
    _swift,
    settings="as they are",
)
_NO_LOSS = {"spare": "as swift_ft: the spare takes over", "process": "as swift_ft: the machine lives"}
GUEST_SWIFT = System(
    "swift_ft, a guest",
    SWIFT.scripts,
    partial(_swift, more=_AT_ONCE),
    cannot=_NO_LOSS,
    settings="without a spare another machine runs the lost one's worker, too, at once "
    "(`--elastic-wait`, its own: 10 s), until the lost one has come again",
)
FEWER_SWIFT = System(
    "swift_ft, three go on",
    {"data": "data_swift_fewer.py"},
    partial(_swift, more=(*_AT_ONCE, "--on-loss", "shrink")),
    cannot=_NO_LOSS,
    shrinks=True,
    settings="without a spare `--on-loss shrink`, at once",
)
OURS = (SWIFT.name, GUEST_SWIFT.name, FEWER_SWIFT.name)
TUNED_TORCHFT = _torchft(_TORCHFT_TIMEOUT_S)
_TORCHRUN = "a lost machine is missed after 3 s (torchrun's own: 15 s)"
SYSTEMS = (
    SWIFT,
    GUEST_SWIFT,
    FEWER_SWIFT,
    _torchft(None),
    TUNED_TORCHFT,
    System(
        "torchrun + DCP",
        {"data": "data_dcp.py", "pipeline": "pipeline_dcp.py", "hsdp": "hsdp_dcp.py"},
        _dcp,
        settings=_TORCHRUN,
    ),
    System(
        "torchrun + DCP, asynchronous",
        {"data": "data_dcp_async.py", "pipeline": "pipeline_dcp_async.py", "hsdp": "hsdp_dcp_async.py"},
        _dcp,
        settings=_TORCHRUN,
    ),
    System(
        "nvidia-resiliency-ext",
        {"data": "data_nvrx.py", "pipeline": "pipeline_nvrx.py"},
        _nvrx,
        cannot={
            "pipeline again": "no: its world shrinks, and a pipeline of three is another one",
            "pipeline process": "no: its world shrinks, and a pipeline of three is another one",
            "hsdp": "fails: over gloo a worker whose own peers live waits, until its monitor ends it",
        },
        shrinks=True,
        needs=("nvidia-resiliency-ext", "0.4.1"),
        settings="in-process restart: heartbeats 3 s (its own: 30 s), looks each 0.1 s (1 s), collectives "
        "give up after 5 s; local checkpoints: in a folder that all share",
        fails={
            "versions after 0.4.1": "no matching distribution for Python 3.11 with glibc 2.36",
            "`BasicTensorAwareStateDict`": "`assert state_dict_value.is_cuda`; here a state of ours does not",
            "copies of local checkpoints elsewhere": "they are sent by `ten.cuda()`; not used here",
            "the wrapper's abort": "ends NCCL; with gloo, a worker whose own peers live waits for a timeout",
        },
    ),
    System(
        "dlrover",
        {"data": "data_dlrover.py"},
        _dlrover,
        _dlrover_master,
        {
            "spare": "no: its master starts machines anew, none waits",
            "pipeline": "no: flash checkpoints of parts are for Megatron-LM, DeepSpeed and FSDP",
            "hsdp": "not measured: its flash checkpoints are of the first FSDP",
        },
        needs=("dlrover", "0.6.1"),
        settings="elastic agent and flash checkpoint, each machine with shared memory of its own",
        fails={
            "`pip install dlrover[torch]` alone": "No module named 'grpc'; `[k8s]` brings it",
            "`dlrover-run --standalone`": "TypeError: SubprocessHandler.__init__() missing 1 required "
            "positional argument: 'numa_options'; here the master is started by hand",
        },
    ),
)
