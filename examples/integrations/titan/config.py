"""The job's configuration: sections of a TOML file, and ``--section.field`` on the command line."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Model:
    """A small Llama."""

    layers: int = 4
    width: int = 32
    heads: int = 4
    kv_heads: int = 2


@dataclass(frozen=True)
class Training:
    """Batches are per replica; the norm is that of all stages' gradients."""

    steps: int = 40
    warmup_steps: int = 5
    lr: float = 3e-3
    max_norm: float = 0.3
    sequence: int = 32
    microbatches: int = 4
    microbatch_size: int = 2
    precision: str = "bfloat16"
    seed: int = 0


@dataclass(frozen=True)
class Parallelism:
    """The sizes of the mesh's dimensions; pp 0 takes what is left."""

    pp: int = 0
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    schedule: str = "1F1B"


@dataclass(frozen=True)
class Validation:
    """Every ``interval`` steps, on ``steps`` batches."""

    interval: int = 5
    steps: int = 1


@dataclass(frozen=True)
class Checkpoint:
    """The trainer's own checkpoints, every ``interval`` steps."""

    folder: str = "runs/titan"
    interval: int = 10

    @property
    def store(self) -> str:
        """Where a session keeps its own."""
        return f"{self.folder}/swift"


SECTIONS: dict[str, type[Any]] = {
    "model": Model,
    "training": Training,
    "parallelism": Parallelism,
    "validation": Validation,
    "checkpoint": Checkpoint,
}


@dataclass(frozen=True)
class JobConfig:
    """All sections."""

    model: Model = Model()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()

    @classmethod
    def from_args(cls, description: str | None) -> JobConfig:
        """Defaults, then the file of ``--config``, then the command line."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with these sections")
        for name, kind in SECTIONS.items():
            group = parser.add_argument_group(name)
            for field in fields(kind):
                flag = f"--{name}.{field.name}"
                group.add_argument(flag, type=type(field.default), help=f"default: {field.default}")
        args = vars(parser.parse_args())
        file: dict[str, Any] = tomllib.loads(args["config"].read_text()) if args["config"] else {}
        for flag, value in args.items():
            section, _, name = flag.partition(".")
            if name and value is not None:
                file.setdefault(section, {})[name] = value
        return cls(**{name: kind(**file.get(name, {})) for name, kind in SECTIONS.items()})
