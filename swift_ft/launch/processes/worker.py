"""The main function of a worker process: it runs the user's script."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from swift_ft.config import detection_timings as timings
from swift_ft.config.exit_codes import EXIT_USAGE
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.agent_channel import AgentChannel, set_agent_channel
from swift_ft.coordination.relay.lines import set_line_of_worker
from swift_ft.coordination.setup_communication import SetupCommunication
from swift_ft.errors import GaveUpError, JobEndedError, UsageError
from swift_ft.launch.log_handlers import show_log
from swift_ft.launch.processes.main_module import run_main, show_error
from swift_ft.launch.processes.script_end import finish
from swift_ft.launch.processes.script_error import cause_of_usage, whose_fault
from swift_ft.launch.processes.sessionless import SessionlessSteps
from swift_ft.launch.processes.stacks import offer_stack
from swift_ft.network import JobSecret, hold_secret
from swift_ft.network.secret import SECRET_VARIABLE
from swift_ft.observe.checked import CheckFolder
from swift_ft.observe.spans import recorder
from swift_ft.program import last_duties
from swift_ft.program.kept_sources import kept_sources
from swift_ft.program.system_exit import exit_code, is_of_signal
from swift_ft.recovery.causes import Cause, cause_of_signal
from swift_ft.torch_adapters.comm_errors import is_broken_communication
from swift_ft.torch_adapters.ddp_construction import construct_within, join_without_sync
from swift_ft.torch_adapters.distribution import distribute_within
from swift_ft.torch_adapters.killed_children import killed_child, watch_pools
from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.script_groups import be_given_own_objects, script_groups

_logger = logging.getLogger(__name__)

_FAILED_ENDS_S = 30.0
"""The longest time that threads and exit handlers of a failed script may take: the other workers wait."""


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """The job of a worker.

    Attributes:
        env: variables to add to the agent's environment.
        target: the script's path, or a module's name.
        args: the script's arguments.
        kind: ``script``, ``module`` (``-m``) or ``program`` (``--no-python``).
        beat_s: seconds between heartbeats to the agent.
        joins: the job's other workers are already training.
        secret: the key of the job's secret, as hexadecimal digits; empty outside of a job.
        sources: the edition of the program's files (`program/kept_sources.py`).
    """

    env: dict[str, str]
    target: str
    args: tuple[str, ...]
    kind: str = "script"
    beat_s: float = timings.WORKER_BEAT_S
    joins: bool = False
    secret: str = field(default="", repr=False)
    sources: int = 0


def run_worker(
    job: WorkerJob, connection: socket.socket, line: socket.socket | None, forked: int
) -> NoReturn:
    """Run the script and end the process with its exit code.

    Args:
        job: what it runs.
        connection: the worker's end of its channel to the agent.
        line: the worker's end of its line to the agent's relay, where there is one.
        forked: when this process began, by the clock of `observe/spans.py`.

    Raises:
        UsageError: it is a program that cannot be run here.
    """
    os.environ.update(job.env)
    if job.secret:
        _take_secret(job)
    if job.kind == "program":
        os.set_inheritable(connection.fileno(), True)  # it closes when the program ends
        _become_program(job)
    if WorkerContext.from_env().started_in > 1:  # a recovery has started it
        recorder.begin(forked, awake=True)
        recorder.add("be forked", forked)
        recorder.lap("make ready for the script")
    if job.joins:  # process groups formed before the session must not wait for the others
        # The others are in the middle of their work and would not answer (decision 63).
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        join_without_sync()
    script_groups.install()
    LastingGroup.interceptor = setup = SetupCommunication.of(WorkerContext.from_env(), joins=job.joins)
    construct_within(setup.left_out)
    distribute_within(setup.left_out, alone=job.joins)
    if job.joins:
        be_given_own_objects(lambda: LastingGroup.interceptor is setup)
    if job.sources and (sources := kept_sources()) is not None:
        sources.begin_edition(job.sources)
    # What a script writes through the root logger is what it writes under torchrun (decision 90).
    show_log("swift_ft", apart=True)
    use_threads_of_environment()
    # When the agent dies the machine counts as lost: clean nothing up, send nothing more.
    channel = AgentChannel(connection, beat_s=job.beat_s, on_agent_lost=lambda: os._exit(1))
    set_agent_channel(channel)
    offer_stack(channel)
    if line is not None:
        set_line_of_worker(line)
    recorder.lap("script before its session")
    context = WorkerContext.from_env()
    if context.check:
        SessionlessSteps(CheckFolder(context.check), context.rank)
    try:
        code = _run_script(job, channel)
        if code == 0:
            last_duties.do_all()
        _finish(code, channel, context.config.exit_timeout_s)
    except KeyboardInterrupt:  # the signal is this worker's failure, and the agent sees which one it was
        code = -signal.SIGINT
    channel.send_last_beat()
    _end_process(code)


def _become_program(job: WorkerJob) -> NoReturn:
    try:
        os.execvp(job.target, [job.target, *job.args])
    except OSError as error:
        raise UsageError(
            f"the program {job.target!r} cannot be run ({error.strerror}): check its path, that it may be "
            "executed, and that it is one of this kind of machine or begins with a line such as #!/bin/sh."
        ) from error


def _finish(code: int, channel: AgentChannel, limit_s: float) -> None:
    """Let the script's threads, handlers and files end. Nobody waits for long for those of a failed one."""

    def end_late(awaited: str) -> None:
        if awaited and code == 0:
            failed = f"the script ended, but {awaited} did not within {limit_s:g} s (--exit-timeout)"
            channel.send(failed=failed, exit_code=1)
            os._exit(1)
        os._exit(code)

    finish(limit_s if code == 0 else min(limit_s, _FAILED_ENDS_S), end_late)


def _end_process(code: int) -> NoReturn:
    """End without an interpreter's shutdown: `launch/processes/script_end.py` says why."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _take_secret(job: WorkerJob) -> None:
    """A program replaces this process and its memory, so it gets the secret in a variable."""
    if job.kind == "program":
        os.environ[SECRET_VARIABLE] = job.secret
    else:
        certificates = WorkerContext.from_env().config.certificates
        hold_secret(JobSecret(bytes.fromhex(job.secret), certificates))


def _run_script(job: WorkerJob, channel: AgentChannel) -> int:
    """Run it to its last line. Returns the exit code that Python would end with."""
    watch_pools()
    try:
        run_main(job.target, job.args, as_module=job.kind == "module")
    except SystemExit as end:
        return _exit_code(end, channel)
    except UsageError as error:
        _logger.error("%s", error, extra={"event": "script_misused"})  # noqa: TRY400  (the line is enough)
        whose = {name: bool(error.fields.get(name)) for name in ("differs", "alike")}
        code: int = error.fields.get("exit_code", EXIT_USAGE)
        channel.send(failed=str(error), exit_code=code, usage=True, cause=cause_of_usage(error), **whose)
        return code
    except JobEndedError as error:  # the launcher prints the reason, once for all workers
        channel.send(failed=str(error), exit_code=1)
        return 1
    except GaveUpError as error:
        _logger.error("%s", error, extra={"event": "recovery_gave_up"})  # noqa: TRY400  (the line is enough)
        channel.send(failed=str(error), exit_code=1, cause=Cause.RUNTIME.value)
        return 1
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a loader's handler raises at any line, also below
        if is_broken_communication(error):
            # This process is ended meanwhile if another worker's failure ends the job.
            time.sleep(timings.OTHERS_REPORT_S)
        elif lost := killed_child(error):  # its machine's fault: as if this process were killed
            channel.send(lost=lost.words, cause=cause_of_signal(lost.signal).value)
            _end_process(1)
        show_error(error)
        channel.send(exit_code=1, **whose_fault(error))
        return 1
    return 0


def _exit_code(end: SystemExit, channel: AgentChannel) -> int:
    """The exit code of ``sys.exit(...)``, of which the agent hears if it says that something is wrong."""
    if is_of_signal(end):  # whatever was interrupted has no part in it
        channel.send(interrupted="")
    if code := exit_code(end):
        detail = "" if isinstance(end.code, int) else f": {end.code}"
        channel.send(failed=f"the script exited with code {code}{detail}"[:2000], exit_code=code)
    return code


def use_threads_of_environment() -> None:
    """As many as ``OMP_NUM_THREADS`` says: torch was imported before that was set, in the standby."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
