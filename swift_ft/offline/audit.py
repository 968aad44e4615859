"""An audit: what a machine has computed between two checkpoints is computed again, and compared.

A spare's agent has it run in a process of its own (`launch/agent/audits.py`). It is a replay without the job
(`offline/replay.py`) whose messages are compared with what their receivers got, and whose state is compared
with the next checkpoint. It does not outlive the agent, and others come first on the processors.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from swift_ft.checkpoint.state_digest import listed
from swift_ft.config.audit import OUTPUT, AuditRequest, AuditResult
from swift_ft.errors import SwiftError, first_line
from swift_ft.offline.gradient_audit import audit_gradients
from swift_ft.offline.part_comparison import differences, digests_in, find_parts, read_part
from swift_ft.offline.replay import OfflineReplayResult, ReplayRequest, ToldRun, replay_machine
from swift_ft.recovery.job_state import SavedPart
from swift_ft.runtime.offline_replay import noted_differences, part_name
from swift_ft.storage.digest import digest_of_json
from swift_ft.storage.store import Store

_PR_SET_PDEATHSIG = 1
_LOWEST_PRIORITY = 19
_PATIENCE_S = 60.0
"""For the last segments of the interval to become readable."""


def audit(request: AuditRequest) -> AuditResult:
    """Compute again, and compare. Call it while the process has a single thread: it forks."""
    if request.gradients:
        return audit_gradients(request)
    out = Path(request.out)
    replay = ReplayRequest(
        request.store,
        request.machine,
        out,
        request.kind,
        request.target,
        request.args,
        until=request.until,
        checkpoint=request.begin,
        told=ToldRun(request.setup, request.log_since, request.moved, request.start_values),
        patience_s=_PATIENCE_S,
        audit=True,
        limit_s=request.limit_s,
    )
    try:
        result = replay_machine(replay)
        return _compared(request, result)
    except SwiftError as error:
        if found := noted_differences(out):
            return AuditResult(slots=error.fields.get("machines", ()), **found[0])
        return AuditResult(problem=first_line(error))


def _compared(request: AuditRequest, result: OfflineReplayResult) -> AuditResult:
    """The state at the end, worker by worker. All messages were alike."""
    saved = find_parts(f"{request.store.rstrip('/')}/checkpoints/{request.until:08d}")
    out = Store(Path(request.out))
    for rank in result.parts:
        store, part = saved[rank]
        if not part.path.rsplit("/", 1)[-1].startswith(part_name(rank)):
            continue  # a replica has saved it, and replicas compare their own digests
        rebuilt, recorded = read_part(out, SavedPart(part_name(rank), "")), read_part(store, part)
        if names := differences(rebuilt, recorded):
            tensors = f"{listed(names)} at its end"
            return AuditResult(
                slots=result.machines,
                rank=rank,
                iteration=request.until - 1,
                tensors=tensors,
                digest=_digest(rebuilt, names),
            )
    return AuditResult(slots=result.machines)


def _digest(state: Mapping[str, Any], names: Sequence[str]) -> str:
    """The digest of some tensors and values of a state."""
    found = digests_in(state)
    return digest_of_json({name: found[name] for name in names if name in found})


def serve_agent(channel: socket.socket) -> NoReturn:
    """Say which process this is, read a request, and write the result. Forked from an agent's standby.

    It ends with the standby, and so with the agent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_LOWEST_PRIORITY)
    code = 1
    try:
        channel.sendall(f"{os.getpid()}\n".encode())
        if text := channel.makefile().readline():
            request = AuditRequest.from_json(text)
            _redirect_output(Path(request.out).with_name(OUTPUT))
            channel.sendall(f"{audit(request).to_json()}\n".encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _redirect_output(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
