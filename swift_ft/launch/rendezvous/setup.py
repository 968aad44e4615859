"""The setup that all machines of a job must share: versions, the script, its arguments, flags, variables.

Another learning rate, another number of threads: a machine with these would train the job's weights to other
values. What differs on purpose (a folder on a local disk) is named by the user: ``--may-differ``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import platform
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from swift_ft.config.installed import installed_version
from swift_ft.config.option import flag_of
from swift_ft.config.run_config import RunConfig
from swift_ft.network import JobSecret
from swift_ft.program.discovery import environment_read_by, main_source
from swift_ft.program.kept_sources import digest_of
from swift_ft.recovery.events import JobOpened

_SHAPE = ("--nnodes", "--nproc-per-node", "--max-restarts")
COMMON_FLAGS = frozenset(_SHAPE) | {
    flag_of(field.name) for field in dataclasses.fields(RunConfig) if field.metadata["option"].same_everywhere
}
"""The flags of swift-run that all machines of a job must have in common."""

_DIGITS = 12
"""The shown digits of a digest: enough to tell two apart."""


def setup_of(
    opened: JobOpened,
    config: RunConfig,
    kind: str,
    target: str,
    secret: JobSecret | None = None,
    args: Sequence[str] = (),
) -> tuple[str, ...]:
    """The facts that machines compare, as ``name: value``.

    A file that is not kept (`program/kept_sources.py`) may change while the job runs, so call it again for
    each time that a machine offers itself.

    Args:
        opened: the job as this machine would open it.
        config: the run's configuration.
        kind: ``script``, ``module`` or ``program`` (see :class:`swift_ft.launch.processes.worker.WorkerJob`).
        target: the script's path, or a module's or program's name.
        secret: the job's, which is not shown: the fact is the same where the secret is.
        args: the script's arguments.
    """
    may_differ = config.different
    facts = {
        "swift_ft": installed_version(),
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        f"the {kind}": f"{Path(target).name} ({_digest(kind, target)})",
        **dict(zip(_SHAPE, (opened.machines, opened.workers_per_machine, opened.restarts), strict=True)),
    }
    for declared in dataclasses.fields(config):
        if flag_of(declared.name) in COMMON_FLAGS:
            value = getattr(config, declared.name)
            if declared.metadata["option"].by_digest and value is not None:
                value = digest_of(value.encode())
            facts[flag_of(declared.name)] = value
    if secret is not None:
        facts["the job's secret (--token-file)"] = secret.token("setup")[:_DIGITS]
        certificates = secret.certificates
        facts["TLS (--tls-cert)"] = "on" if certificates is not None else "off"
        if certificates is not None:
            facts["the authorities (--tls-ca)"] = certificates.authorities().hex()[:_DIGITS]
    facts |= argument_facts(args, may_differ) | environment_facts(environment_read_by(), may_differ)
    return tuple(f"{name.replace(': ', ':')}: {value}" for name, value in facts.items())


def is_readable_file(path: str) -> bool:
    """Whether this user can read a file there. No error where not even its folder may be looked into."""
    return os.access(path, os.R_OK) and Path(path).is_file()


def _digest(kind: str, target: str) -> str:
    """The beginning of the SHA-256 of a script's content. A program has none: it may differ by host."""
    if kind != "program" and (kept := main_source(target, as_module=kind == "module")) is not None:
        return kept.digest
    path: str | None = target
    if kind == "module":
        found = importlib.util.find_spec(target)
        path = found.origin if found is not None else None
    if kind == "program" or path is None or not Path(path).is_file():
        return "not read"
    return digest_of(Path(path).read_bytes())


# -------------------------------------------------------------------- the script's arguments and environment

_CHANGE_NUMBERS = (
    # How many threads share a sum, and by which code, decides in which order it is added up.
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_CBWR",
    "MKL_DYNAMIC",
    "OMP_DYNAMIC",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    # Which kernels an accelerator's libraries choose, and in which precision they compute.
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDNN_DETERMINISTIC",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "PYTORCH_JIT",
    # In which order ranks add up in a collective. Both ends must agree on these anyway.
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    # The order of sets of texts, where it is fixed at all.
    "PYTHONHASHSEED",
)
"""Variables that libraries read, and that change the bits of a result. A script does not name them."""

_OF_A_MACHINE = re.compile(
    r"(GROUP_|LOCAL_|NODE_|MACHINE_|ROLE_)?(RANK|WORLD_SIZE|ID|NAME|IP)|GROUP_WORLD_SIZE|MASTER_(ADDR|PORT)|"
    r"(HOST|POD)(NAME|_NAME|_IP)?|HOME|USER|LOGNAME|SHELL|PATH|(OLD)?PWD|TERM|TMPDIR|TE?MP|"
    r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|"
    r"(SLURM|PMIX?|OMPI|MPI|KUBERNETES|TORCHELASTIC|PET|SWIFT|XDG|SSH)_.*"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL")
"""Variables that belong to a machine or a user: what a script reads from them changes no result."""

_ARGUMENTS_OF_A_MACHINE = frozenset({"rank", "local-rank", "node-rank", "machine-rank", "hostname"})

_OPTION = re.compile(r"--?[A-Za-z_]")
_PLAIN = re.compile(r"[^\n@]{0,120}")
"""Values that are shown as they are. In a URL with ``@`` there may be a password."""


def argument_facts(args: Iterable[str], may_differ: Collection[str] = ()) -> dict[str, str]:
    """A script's arguments by name: an option with all that follows it up to the next one.

    Args:
        args: as the script gets them.
        may_differ: options that are left out, as ``data``; and numbers of arguments before all options.
    """
    exempt = {_name(name) for name in may_differ} | _ARGUMENTS_OF_A_MACHINE
    return {
        f"the script's {name}": _shown(shlex.join(values))
        for name, values in _by_option(args)
        if _name(name.partition(" (")[0].removeprefix("argument ")) not in exempt
    }


def _name(option: str) -> str:
    return option.strip().lstrip("-").replace("_", "-")


def _by_option(args: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    times: Counter[str] = Counter()
    for arg in args:
        if _OPTION.match(arg):
            name, given, value = arg.partition("=")
            times[name] += 1
            again = f" ({times[name]})" if times[name] > 1 else ""
            found.append((name + again, [value] if given else []))
        elif found and found[-1][0].startswith("-"):
            found[-1][1].append(arg)
        else:
            found.append((f"argument {len(found) + 1}", [arg]))
    yield from found


def environment_facts(
    read: Iterable[str], may_differ: Collection[str] = (), env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables that change what a script computes, as far as that can be known.

    Args:
        read: those that the script reads by name.
        may_differ: those that are left out.
        env: where they are.
    """
    names = {*_CHANGE_NUMBERS, *filter(_is_of_the_program, read)} - {name.strip() for name in may_differ}
    values = {name: env.get(name) for name in sorted(names)}
    return {
        f"the variable {name}": "not set" if value is None else _shown(value)
        for name, value in values.items()
        if value is not None or name not in _CHANGE_NUMBERS
    }


def _is_of_the_program(name: str) -> bool:
    return not _OF_A_MACHINE.fullmatch(name) and not _SECRET.search(name.upper())


def _shown(value: str) -> str:
    """A value as others may read it, or a digest of it."""
    if _PLAIN.fullmatch(value):
        return value
    return f"another text ({hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:_DIGITS]})"
