"""Events of the journal about the end of scripts and of the job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFinished:
    """A worker has completed its last iteration. It stays until all workers have.

    Attributes:
        rank: the worker.
        generation: in which it has.
        saves: that iteration, if a checkpoint of all workers follows it; else None.
    """

    rank: int
    generation: int
    saves: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptExited:
    """The script of a worker ended with exit code 0.

    Attributes:
        machine: the worker's machine.
        started_in: the generation in which the worker was started.
        rank: the worker; None for all workers of the machine.
        iteration: iterations that it had completed; None if that is unknown.
    """

    machine: str
    started_in: int
    rank: int | None = None
    iteration: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFailed:
    """A script, as started in generation ``started_in``, raised or exited with an error of its own.

    That is not a machine's death. ``usage`` marks an error that the user can fix. Of these, ``differs`` marks
    one of a worker that runs another program than the job's other workers do, and ``alike`` one in which each
    other machine would end, too. ``iteration`` counts what the worker had completed; None if that is unknown.
    ``cause`` and ``evidence`` are those of :class:`MachineLost`.
    """

    machine: str
    started_in: int
    reason: str
    exit_code: int = 1
    usage: bool = False
    differs: bool = False
    alike: bool = False
    iteration: int | None = None
    cause: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClosed:
    """The job ends on request (Ctrl-C, SIGTERM), or because it cannot continue.

    ``cause`` and ``evidence`` are as elsewhere.
    """

    reason: str
    exit_code: int = 1
    cause: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected:
    """A test is about to inject a fault. Each fault happens once in a run."""

    fault: str
