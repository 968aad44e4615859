"""An example on a machine that computes wrong without any error (WRONG, as JSON).

``{"example": "train_ddp", "rank": 1, "iteration": 5, "what": "product"}`` flips a bit, on that worker and in
that iteration, of the next matrix product's result; with ``"what": "parameter"`` of a parameter in the middle
of the step, with ``"message"`` of what a stage computes, just before it is sent, with ``"received"`` of what
a stage was sent, after it has come, with ``"link"`` of the same on its way, with ``"result"`` of a scalar
that the script broadcasts, likewise, with ``"average"`` of the average of gradients. ``"times"`` are the
computations of the iteration that it strikes, from 1 on, each time in another bit: ``[1]`` unless said
otherwise. Rank -1 is all of them, ``"ranks"`` are several, and ``"every"`` strikes in each iteration from
that one on. What has struck is a file ``struck-RANK-ITERATION-TIME`` in the test's folder. ``"live"`` spares
replays without the job: it is that machine's fault; ``"audits"`` strikes these alone. ``"worn"``: it is the
machine on which the worker was at first, and not the one that replaces it. ``"threads"`` is how many of them
a spare computes with, unlike the machines. ``"resumes"`` is no fault: the script is one that begins otherwise
where it finds that it was there before.

``"waits": {n: "marked"}``: before iteration n, worker 0 waits until a spare has audited all machines,
``"all"``: until the time from iteration 3 to 6 is audited; ``"judged"``: until a difference is judged;
``"auditing"``: until an audit stands still in the middle, at the
iteration ``"stands"``, for good; ``"recovered"``: until a machine was replaced. ``"ends": n``: worker 0 ends
with an error before iteration n, once all have gone back since what they had computed was in doubt.
"""

import contextlib
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode

import swift_ft
from swift_ft.config.worker_context import WorkerContext
from swift_ft.recovery.job_state import State
from swift_ft.recovery.membership import base_of
from swift_ft.runtime.pipeline.log_interceptor import LogInterceptor
from swift_ft.runtime.pipeline.script_communication import ScriptCommunication
from swift_ft.torch_adapters.ddp import DataParallelHook
from swift_ft.torch_adapters.pipelining.interceptor import Message
from swift_ft.torch_adapters.script_operations import Operation

wrong = json.loads(os.environ["WRONG"])
times = wrong.get("times", [1])
OFFLINE = WorkerContext.from_env().offline
AUDITED_S = 100.0
AUDITING = Path(os.environ["SWIFT_TEST_FOLDER"]) / "auditing"
example: Any = importlib.import_module(wrong["example"])
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Fault:
    """Strikes once in each computation that it is meant for. It counts in files: the step is put back.

    What it notes is on a module of torch's, and so no variable of the script, in which a machine and a spare
    would be unlike.
    """

    def begin(self, iteration: int) -> None:
        rank, folder = torch.distributed.get_rank(), Path(os.environ["SWIFT_TEST_FOLDER"])
        number = 1 + len([*folder.glob(f"computed-{rank}-{iteration}-*")])
        (folder / f"computed-{rank}-{iteration}-{number}").touch()
        first, ranks = wrong["iteration"], wrong.get("ranks", [wrong["rank"]])
        due = iteration >= first if wrong.get("every") else iteration == first
        mine = due and (rank in ranks or -1 in ranks) and self._is_here(folder)
        noted.due, noted.number = mine and number in times, number
        noted.place = folder / f"struck-{rank}-{iteration}-{number}"

    def _is_here(self, folder: Path) -> bool:
        """Whether this machine is the one that is at fault."""
        if wrong.get("audits" if OFFLINE is None else "live", False):
            return False
        if not wrong.get("worn"):
            return True
        machine = WorkerContext.from_env().machine
        with contextlib.suppress(FileExistsError), (folder / "worn").open("x") as worn:
            worn.write(machine)
        return base_of((folder / "worn").read_text()) == base_of(machine)

    def strike(self, tensor: torch.Tensor) -> None:
        if noted.due:
            noted.due = False
            # Not of a version that autograd would compare: no flipped bit tells anybody.
            tensor.data.view(torch.int32).view(-1)[-1] ^= 1 << (10 + noted.number)
            noted.place.touch()


if OFFLINE is not None and "threads" in wrong:
    torch.set_num_threads(wrong["threads"])
BEFORE = Path(os.environ["SWIFT_TEST_FOLDER"]) / "was-here-before"
scale = 0.5 if BEFORE.exists() else 1.0
fault = Fault()
noted: Any = torch
noted.due = False


def wait_for_audit(session: swift_ft.Session, what: str) -> None:
    """Wait, so that a test does not depend on how fast a spare is."""
    if torch.distributed.get_rank() != 0:
        return
    until = time.monotonic() + AUDITED_S
    while not is_over(session._assembly._participant.state, what):
        assert time.monotonic() < until, "nothing was audited"
        time.sleep(0.05)


def is_over(state: State, what: str) -> bool:
    if what == "auditing":
        return AUDITING.exists()
    if what == "all":
        return {(mark.begin, mark.until) for mark in state.audits.marks} >= {(3, 6)}
    done = {"judged": state.audits.judged, "marked": state.audits.marks, "recovered": ()}[what]
    return bool(done) or state.generation > 1


def is_in_doubt(session: swift_ft.Session) -> bool:
    rank, state = torch.distributed.get_rank(), session._assembly._participant.state
    return rank == 0 and bool(state.checkpoints.doubts)


def stand_still() -> None:
    AUDITING.touch()
    while True:
        time.sleep(1.0)


class WrongProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in PRODUCTS and noted.due:
            fault.strike(found)
        return found


original_init, original_steps = swift_ft.Session.__init__, swift_ft.Session.steps


def init(self: swift_ft.Session, state: Any, **arguments: Any) -> None:
    original_init(self, state, **{**arguments, **wrong.get("arguments", {})})
    noted.model = state["model"]


def steps(self: swift_ft.Session, iterations: int) -> Iterator[Any]:
    if wrong["what"] == "parameter":
        first = next(noted.model.parameters())
        first.register_hook(lambda _: fault.strike(next(noted.model.parameters())))
    if wrong["what"] == "resumes":
        for part in noted.model.children():  # stages, or what DDP wraps
            part.register_forward_hook(lambda _module, _args, output: scale * output)
    for step in original_steps(self, iterations):
        if step._index == 2:
            BEFORE.touch()
        if OFFLINE is not None and step._index == wrong.get("stands"):
            stand_still()
        if OFFLINE is None and wrong.get("waits", {}).get(str(step._index)):
            wait_for_audit(self, wrong["waits"][str(step._index)])
        if OFFLINE is None and step._index == wrong.get("ends") and is_in_doubt(self):
            raise RuntimeError("it ends while all compute again")
        fault.begin(step._index)
        if wrong["what"] == "product":
            with WrongProducts():
                yield step
        else:
            yield step


forward_one_chunk = PipelineStage.forward_one_chunk


def computed(self: PipelineStage, microbatch: int, *args: Any, **kwargs: Any) -> Any:
    if wrong["what"] == "received" and not self.is_first:
        received: Any = self.args_recv_info[microbatch][0]
        fault.strike(received.buffer)
    found = forward_one_chunk(self, microbatch, *args, **kwargs)
    if wrong["what"] == "message" and not self.is_last:
        fault.strike(self.fwd_cache[microbatch][0][0])
    return found


on_received = LogInterceptor.on_received


def received(self: LogInterceptor, message: Message) -> None:
    if wrong["what"] == "link":
        fault.strike(message.tensor)
    on_received(self, message)


begin = ScriptCommunication.begin


def begun(self: ScriptCommunication, operation: Operation) -> Callable[[], None] | None:
    end = begin(self, operation)
    if (
        wrong["what"] != "result"
        or end is None
        or operation.name != "broadcast"
        or operation.tensors[0].dim()
    ):
        return end

    def ended() -> None:
        fault.strike(operation.tensors[0])
        for kept in operation.kept:
            kept.copy_(operation.tensors[0])
        end()

    return ended


arrived = DataParallelHook._arrived


def summed(self: DataParallelHook, bucket: torch.distributed.GradBucket) -> None:
    if wrong["what"] == "average":
        fault.strike(bucket.buffer())
    arrived(self, bucket)


PipelineStage.forward_one_chunk = computed  # type: ignore[assignment]
DataParallelHook._arrived = summed
LogInterceptor.on_received = received
ScriptCommunication.begin = begun
swift_ft.Session.__init__, swift_ft.Session.steps = init, steps
example.main()
