"""Where a worker of the examples computes, and over which backend: CPUs with gloo, or GPUs with NCCL."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--device`` and ``--backend``."""
    parser.add_argument("--device", choices=[*BACKENDS], default="cpu", help="default: %(default)s")
    parser.add_argument("--backend", choices=[*BACKENDS.values()], help="default: what fits the device")


def join(args: argparse.Namespace) -> torch.device:
    """Makes the group of all workers.

    Returns:
        The device of this worker.
    """
    device = torch.device("cpu")
    if args.device == "cuda":
        device = own_gpu()
        same_bits_in_each_run()
    dist.init_process_group(args.backend or BACKENDS[args.device])
    return device


def own_gpu() -> torch.device:
    """The GPU of this worker, by its rank. Workers share one where there are fewer than workers.

    NCCL refuses two members on one GPU, unless each says that it is on a host of its own.
    """
    device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ["NCCL_HOSTID"] = f"worker{os.getpid()}"
        os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    return device


def same_bits_in_each_run() -> None:
    """For the comparison of a disturbed run with another one. The fused kernels of attention may differ."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
