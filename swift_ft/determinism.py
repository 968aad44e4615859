"""Makes a replay draw the same random numbers and use the same kernels as the original (paper §6)."""

from __future__ import annotations

import os
import random
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

__all__ = [
    "UNLIKE_RESULT",
    "derive_seed",
    "deterministic",
    "host_random_state",
    "random_state",
    "seed_host",
    "seed_step",
    "seed_torch",
    "set_host_random_state",
    "set_random_state",
]

UNLIKE_RESULT = (
    "Either the computation is not deterministic (swift_ft.deterministic() may help), or the script keeps "
    "something that changes from step to step outside of Session(state), as in an attribute: put it there"
)
"""The end of a message that says that the same step has had another result."""


def deterministic() -> None:
    """Ask torch for deterministic algorithms, in this process, from now on.

    Call it before the first use of an accelerator. An operation without a deterministic implementation then
    raises an error that names it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from (seed, iteration, stage, microbatch ...). Equal parts give equal seeds."""
    digest = blake2b(b"".join(part.to_bytes(8, "little", signed=True) for part in parts), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


def seed_torch(seed: int) -> None:
    """Seed torch's generators: the host's, and each accelerator's when it is next used."""
    torch.default_generator.manual_seed(seed)
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed(seed)


def random_state() -> dict[str, torch.Tensor]:
    """The states of torch's generators: the host's, and the current accelerator's if there is one."""
    states = {"host": torch.default_generator.get_state()}
    if torch.accelerator.is_available():
        states["accelerator"] = torch.get_device_module().get_rng_state()
    return states


def set_random_state(states: dict[str, torch.Tensor]) -> None:
    """The inverse of :func:`random_state`."""
    torch.default_generator.set_state(states["host"].cpu())
    if "accelerator" in states:
        torch.get_device_module().set_rng_state(states["accelerator"].cpu())


def seed_host(seed: int) -> None:
    """Seed Python's and NumPy's global generators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def host_random_state(*, plain: bool = True) -> dict[str, Any]:
    """The state of Python's and NumPy's global generators.

    Args:
        plain: as plain values and tensors, which can be saved and sent; else as the generators give it, which
            takes less time.
    """
    if not plain:
        return {"python": random.getstate(), "numpy": np.random.get_state(legacy=True)}
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            cached,
        ],
    }


def set_host_random_state(state: dict[str, Any]) -> None:
    """The inverse of :func:`host_random_state`, of either form."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    words = keys.numpy().astype(np.uint32) if isinstance(keys, torch.Tensor) else keys
    np.random.set_state((name, words, position, has_gauss, cached))


def seed_step(seed: int, iteration: int, rank: int | None) -> None:
    """Derive the random numbers of a step from its iteration, and from the rank if one is given."""
    derived = derive_seed(seed, iteration, -1, *(() if rank is None else (rank,)))
    seed_torch(derived)
    seed_host(derived)
