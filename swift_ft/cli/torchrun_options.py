"""Reads torchrun's own options: what is wrong in one of them is said in one line, as for all others."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_min_max_nnodes

from swift_ft.config.store_address import ETCD
from swift_ft.errors import UsageError, first_line
from swift_ft.torch_adapters.elastic_agent import MachineLogs

_EMBEDDED_NAMES = ("static", "c10d", "swift")
"""Backends of torchrun that stand for the embedded store."""


def check_program(name: str) -> None:
    """Check that a program of ``--no-python`` can be run from here.

    Raises:
        UsageError: it is not there, or may not be executed.
    """
    if shutil.which(name) is not None:
        return
    if Path(name).is_file():
        raise UsageError(f"The program {name!r} may not be executed: give its path, and use chmod +x {name}.")
    raise UsageError(f"There is no program {name!r}: check the path.")


def machines_in(nnodes: str) -> tuple[int, int]:
    """The fewest machines and the most that ``--nnodes`` allows.

    Raises:
        UsageError: it is another text.
    """
    try:
        least, most = parse_min_max_nnodes(nnodes)
    except (ValueError, RuntimeError):
        least, most = 0, 0
    if not 0 < least <= most:
        raise UsageError(f"--nnodes {nnodes!r}: give a number of machines, or a range such as 2:4.")
    return least, most


def launch_config(args: argparse.Namespace) -> LaunchConfig:
    """Torchrun's configuration from its options. Makes the folder of ``--log-dir``.

    Raises:
        UsageError: an option is wrong, or the folder cannot be made.
    """
    if args.rdzv_backend not in (*_EMBEDDED_NAMES, ETCD):
        raise UsageError(
            f"--rdzv-backend {args.rdzv_backend} is not supported: swift-run uses torch's TCPStore (omit the "
            f"flag) or {ETCD}."
        )
    torchrun_args = argparse.Namespace(**vars(args))
    torchrun_args.rdzv_backend, torchrun_args.rdzv_endpoint = "c10d", "unused:0"  # the rendezvous is our own
    torchrun_args.node_rank = 0  # torch would warn that its c10d ignores it
    torchrun_args.local_ranks_filter = ""  # read below
    ranks = _local_ranks(args.local_ranks_filter)
    try:
        with _cuda_unasked():
            config, _, _ = config_from_args(torchrun_args)
        config.logs_specs = MachineLogs(
            log_dir=str(Path(args.log_dir).absolute()),
            redirects=Std.from_str(args.redirects),
            tee=Std.from_str(args.tee),
            local_ranks_filter=ranks or None,
        )
        if not os.access(args.log_dir, os.W_OK):
            raise PermissionError("it may not be written")
    except OSError as error:
        raise UsageError(
            f"--log-dir {args.log_dir}: this folder cannot be used ({error.strerror or first_line(error)}): "
            "give another one, or /dev/null for none."
        ) from error
    except (ValueError, RuntimeError, AssertionError) as error:  # all that torch has for wrong options
        raise UsageError(f"An option of torchrun's is wrong: {first_line(error)}") from error
    return config


def _local_ranks(text: str) -> set[int]:
    try:
        return {int(rank) for rank in text.split(",") if rank}
    except ValueError as error:
        raise UsageError(
            f"--local-ranks-filter {text!r}: give local ranks, separated by commas, such as 0,1."
        ) from error


@contextlib.contextmanager
def _cuda_unasked() -> Iterator[None]:
    """Torch asks the driver for GPUs. If it asked CUDA, no process that is forked from here could use one."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
