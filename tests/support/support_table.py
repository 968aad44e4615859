"""What works with what: `tests/cluster/test_support.py` runs this table, and `docs/support.md` shows it."""

from __future__ import annotations

from dataclasses import dataclass

FEATURES = {
    "compile": "`torch.compile` of the module (backend `aot_eager`)",
    "inductor": "`torch.compile` of the module (backend `inductor`)",
    "checkpointing": "activation checkpointing, with dropout",
    "autocast": "bf16 autocast",
    "scaler": "`GradScaler`, with float16 autocast",
    "EMA": "EMA (`AveragedModel`)",
    "fused": "a fused optimizer (`AdamW(fused=True)`)",
    "foreach": "a `foreach` optimizer (`AdamW(foreach=True)`)",
    "tied": "tied embeddings",
}
"""Of torch, and how the tests use them."""

TOGETHER = "checkpointing+autocast+EMA+foreach"
"""Several of them in one run."""


@dataclass(frozen=True)
class Parallelism:
    """How a training is spread, and how it loses a machine.

    Attributes:
        machines: that train.
        fault: of ``swift-run --inject``.
        way: of the recovery.
        workers: of each machine.
    """

    machines: int
    fault: str
    way: str
    workers: int = 1


PARALLELISMS = {
    "pipeline": Parallelism(2, "kill machine=1 iteration=3 point=backward microbatch=1", "replay"),
    "DDP": Parallelism(2, "kill machine=1 iteration=3 point=optimizer", "replica"),
    "DDP x pipeline": Parallelism(4, "kill machine=2 iteration=3 point=backward microbatch=1", "replica"),
    "TP x pipeline": Parallelism(
        2, "kill machine=1 iteration=3 point=backward microbatch=1", "replay", workers=2
    ),
    "TP, memory checkpoints": Parallelism(2, "kill machine=1 iteration=3 point=between", "memory"),
    "HSDP": Parallelism(4, "kill machine=1 iteration=3 point=between", "replica"),
    "FSDP2, memory checkpoints": Parallelism(2, "kill machine=1 iteration=3 point=between", "memory"),
}


@dataclass(frozen=True)
class Case:
    """One place of the table.

    Attributes:
        feature: a key of :data:`FEATURES`, or several joined by ``+``.
        parallelism: a key of :data:`PARALLELISMS`.
        refused: a part of the line that refuses it; empty if it works.
        note: what a user has to know.
        impossible: why torch itself cannot do it; empty if it can.
        quick: run by ``make test``; ``make test-support`` runs all.
    """

    feature: str
    parallelism: str
    refused: str = ""
    note: str = ""
    impossible: str = ""
    quick: bool = False


_OF_FSDP = ("HSDP", "FSDP2, memory checkpoints")
_OF_TP = ("TP x pipeline", "TP, memory checkpoints")
_OVER_ALL = ("scaler", "EMA", "fused", "foreach", TOGETHER)
"""What works on all parameters together."""
_NOTES = {
    ("scaler", "pipeline"): "stages agree on overflows by an all-reduce",
    ("scaler", "DDP x pipeline"): "stages agree on overflows by an all-reduce",
    ("tied", "pipeline"): "`session.tie()`",
    ("tied", "DDP x pipeline"): "`session.tie()`",
}
_NO_COPY = "torch cannot copy a model of FSDP2, as `AveragedModel` does"
_MIXED = "torch refuses to update sharded and whole parameters together"
TORCH_SAYS = {_NO_COPY: "FSDP does not support deepcopy", _MIXED: "mixed torch.Tensor and DTensor"}
"""How torch ends a script that tries what is impossible."""
_IMPOSSIBLE = {
    **{(name, parallelism): _NO_COPY for name in ("EMA", TOGETHER) for parallelism in _OF_FSDP},
    **{(name, parallelism): _MIXED for name in _OVER_ALL for parallelism in _OF_TP},
}
_REFUSED: dict[tuple[str, str], str] = {}
_QUICK = {("tied", "DDP x pipeline"), ("autocast", "FSDP2, memory checkpoints"), ("autocast", "HSDP")}


def _case(feature: str, parallelism: str) -> Case:
    place = feature, parallelism
    return Case(
        feature,
        parallelism,
        refused=_REFUSED.get(place, ""),
        note=_NOTES.get(place, ""),
        impossible=_IMPOSSIBLE.get(place, ""),
        quick=place in _QUICK or feature == TOGETHER,
    )


CASES = [_case(feature, parallelism) for feature in (*FEATURES, TOGETHER) for parallelism in PARALLELISMS]
"""All places, row by row."""
