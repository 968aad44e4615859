"""The paper's jobs, as profiles to group and workloads to simulate; every number names its source."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swift_ft.costs.chain_profile import ChainProfile
from swift_ft.errors import UsageError
from swift_ft.planning.advisor import boundary_bytes
from swift_ft.planning.simulation.failure_laws import Exponential, FailureLaw, UniformCount
from swift_ft.planning.simulation.strategies import Cluster, Strategy

HOUR = 3600.0


@dataclass(frozen=True)
class Fact:
    """An input of a result. Its source says ``assumed`` if no published number exists."""

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Workload:
    """A training job: its duration without failures, its failures, and what each strategy costs."""

    name: str
    work_s: float
    cluster: Cluster
    law: FailureLaw
    strategies: tuple[Strategy, ...]
    swift: str  # the strategy that the paper calls "SWIFT" for this job
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class _Pipeline:
    """Shapes of §7.1: a 128-stage pipeline on 16 machines, activations of float32."""

    batch: int
    tokens: int
    microbatches: int
    hours: float
    iterations: int
    hidden: int = 1024
    stages: int = 128
    machines: int = 16

    @property
    def iteration_s(self) -> float:
        return self.hours * HOUR / self.iterations

    def profile(self) -> ChainProfile:
        """Both directions of ``batch x tokens x hidden`` float32; pipelined replay of own stages."""
        boundary = boundary_bytes(
            microbatches=self.microbatches,
            microbatch_size=self.batch // self.microbatches,
            sequence=self.tokens,
            hidden=self.hidden,
        )
        local = self.stages // self.machines
        slot_s = self.iteration_s / (self.microbatches + self.stages - 1)
        replay_s = slot_s * (self.microbatches + local - 1)
        return ChainProfile((replay_s,) * self.machines, (boundary,) * (self.machines - 1))


# tokens: 7 x 7 patches of ViT-Large/32, sequences of 128 for BERT. With these the log sizes are exactly
# those of table 3, 24.66 and 8.05 GB.
_PIPELINES = {
    "vit-128": _Pipeline(batch=4096, tokens=49, microbatches=16, hours=85.6, iterations=93_600),
    "bert-128": _Pipeline(batch=512, tokens=128, microbatches=4, hours=461.1, iterations=500_000),
}
PROFILE_PRESETS = tuple(_PIPELINES)
WORKLOAD_PRESETS = ("wide-resnet-50", *_PIPELINES)


def preset_profile(name: str) -> ChainProfile:
    """The profile of one of :data:`PROFILE_PRESETS`.

    Raises:
        UsageError: for another name.
    """
    if name not in _PIPELINES:
        raise UsageError(f"there is no profile preset {name!r}: take one of {', '.join(PROFILE_PRESETS)}")
    return _PIPELINES[name].profile()


def preset_workload(name: str) -> Workload:
    """The workload of one of :data:`WORKLOAD_PRESETS`, with the settings of table 4.

    Raises:
        UsageError: for another name.
    """
    if name == "wide-resnet-50":
        return _wide_resnet()
    if name == "vit-128":
        return _pipeline("vit-128", 312, 5, 1.64e9 * 8, (0.360, 0.573))
    if name == "bert-128":
        return _pipeline("bert-128", 5000, 27, 1.11e9 * 12, (0.585, 0.763))
    raise UsageError(f"there is no preset {name!r}: take one of {', '.join(WORKLOAD_PRESETS)}")


def _startup_facts(cluster: Cluster) -> tuple[Fact, ...]:
    return (
        Fact(
            "detection", cluster.detection_s, "s", "assumed: polling every few seconds (§6 gives no number)"
        ),
        Fact(
            "replacement machine",
            cluster.replacement_s,
            "s",
            "assumed: the scheduler starts it (no number in §7)",
        ),
        Fact("join", cluster.join_s, "s", "assumed: Python, CUDA and NCCL start (no number in §7)"),
    )


def _wide_resnet() -> Workload:
    work_s, iterations, interval, count = 479.4 * HOUR, 450_360, 5_004, 28
    iteration_s = work_s / iterations
    state = 1.23e9 * 8
    rate = 0.5e9
    save_s = state / rate
    measured = save_s + 50 * iteration_s  # global recovery in the experiment of §7.1: 50 iterations lost
    replica_s = (1 - 0.989) * measured
    snapshot_restore_s = max(0.0, replica_s / (1 - 0.981) - 30 * iteration_s)
    every = 30 * iteration_s
    snapshots = iterations / 30
    # stalls: the hours of §7.3 minus the cost of failures (15 iterations and a start-up each)
    cluster = Cluster(machines=2)
    per_failure = cluster.startup_s + snapshot_restore_s + every / 2
    checkfreq_s = ((518.9 - 479.4) * HOUR - count * per_failure) / snapshots
    horovod_s = ((515.9 - 479.4) * HOUR - count * per_failure) / snapshots
    checkpoint_s = interval * iteration_s
    strategies = (
        Strategy("no_fault_tolerance", "rollback", math.inf),
        Strategy("global_checkpoint", "rollback", checkpoint_s, save_s, save_s),
        Strategy("checkfreq", "rollback", every, checkfreq_s, snapshot_restore_s),
        Strategy("elastic_horovod", "rollback", every, horovod_s, snapshot_restore_s),
        Strategy("swift_replication", "replication", checkpoint_s, save_s, replica_s, save_s),
    )
    facts = (
        *_table4(479.4, iterations, interval, count),
        Fact("model state", state, "bytes", "1.23e9 parameters (table 2), SGD with momentum in float32"),
        Fact(
            "checkpoint bandwidth",
            rate,
            "bytes/s",
            "assumed: one process serialises and writes synchronously",
        ),
        Fact("checkpoint stall and load", save_s, "s", "model state / checkpoint bandwidth"),
        Fact("replication recovery", replica_s, "s", "98.9 % less than load + 50 iterations (§7.1)"),
        Fact("snapshot load", snapshot_restore_s, "s", "98.1 % against 98.9 % (§7.1), less 30 iterations"),
        Fact(
            "CheckFreq stall per snapshot",
            checkfreq_s,
            "s",
            "inferred from the 518.9 h of §7.3, no check of it",
        ),
        Fact("Elastic Horovod stall", horovod_s, "s", "inferred from the 515.9 h of §7.3, no check of it"),
        *_startup_facts(cluster),
    )
    return Workload(
        "wide-resnet-50", work_s, cluster, UniformCount(count), strategies, "swift_replication", facts
    )


def _table4(hours: float, iterations: int, interval: int, count: int) -> tuple[Fact, ...]:
    return (
        Fact("training time without failure", hours, "h", "table 4"),
        Fact("iterations", iterations, "", "table 4"),
        Fact("checkpoint interval", interval, "iterations", "table 4"),
        Fact("failures", count, "", "table 5; uniformly spread over training (§7.3)"),
    )


def _pipeline(name: str, interval: int, count: int, state: float, less: tuple[float, float]) -> Workload:
    shape = _PIPELINES[name]
    rate = (
        1.11e9 * 12 / shape.stages / 0.93
    )  # BERT-128: 0.93 s for a stage's share of parameters and Adam's state
    save_s = state / shape.stages / rate
    cluster = Cluster(machines=shape.machines)
    checkpoint_s = interval * shape.iteration_s
    extra = 5.0
    strategies = (
        Strategy("no_fault_tolerance", "rollback", math.inf),
        Strategy("global_checkpoint", "rollback", checkpoint_s, save_s, save_s),
        Strategy("swift_logging", "logging", checkpoint_s, save_s, save_s, save_s, 1 - less[0], 0.0, extra),
        Strategy(
            "swift_logging_parallel", "logging", checkpoint_s, save_s, save_s, save_s, 1 - less[1], 0.0, extra
        ),
    )
    facts = (
        *_table4(shape.hours, shape.iterations, interval, count),
        Fact("model state", state, "bytes", "table 2; momentum (ViT) or Adam (BERT) in float32"),
        Fact("checkpoint bandwidth", rate, "bytes/s per stage", "0.93 s for BERT-128 (§7.3) over 128 stages"),
        Fact("checkpoint stall and load", save_s, "s", "a stage's state / checkpoint bandwidth"),
        Fact("replay, logging", 1 - less[0], "of recomputation", "16 groups, §7.1; linear in what is lost"),
        Fact("replay, parallel recovery", 1 - less[1], "of recomputation", "§7.1; linear in what is lost"),
        Fact("logging slowdown", 0.0, "", "off the critical path (§7.1: similar throughput)"),
        Fact(
            "more start-up with logging", extra, "s", "assumed: streams and threads ('slightly more', §7.1)"
        ),
        *_startup_facts(cluster),
    )
    return Workload(
        name, shape.hours * HOUR, cluster, UniformCount(count), strategies, "swift_logging_parallel", facts
    )


def cluster_workload(
    *,
    machines: int,
    mtbf_s: float,
    work_s: float,
    checkpoint_interval_s: float = HOUR,
    checkpoint_stall_s: float = 30.0,
    load_s: float = 120.0,
    cluster: Cluster | None = None,
) -> Workload:
    """A job of any size on machines that fail exponentially.

    Start-up times are the cluster's. The facts of the result say what snapshots, undo and replay cost.

    Args:
        machines: how many train.
        mtbf_s: mean seconds between failures of one machine.
        work_s: training time without failures, seconds.
        checkpoint_interval_s: seconds of training between global checkpoints.
        checkpoint_stall_s: seconds that one stalls training.
        load_s: seconds to load one on all machines.
        cluster: start-up times and spares; its number of machines is replaced.
    """
    cluster = cluster or Cluster(machines=machines)
    snapshot_s, snapshot_stall_s, undo_s = 300.0, 3.0, 10.0
    log, spread = 1 - 0.360, 1 - 0.573
    every = checkpoint_interval_s
    stall = checkpoint_stall_s
    strategies = (
        Strategy("no_fault_tolerance", "rollback", math.inf),
        Strategy("global_checkpoint", "rollback", every, stall, load_s),
        Strategy("checkfreq", "rollback", snapshot_s, snapshot_stall_s, load_s),
        Strategy("elastic_horovod", "rollback", snapshot_s, snapshot_stall_s, undo_s),
        Strategy("swift_replication", "replication", every, stall, undo_s, load_s),
        Strategy("swift_logging", "logging", every, stall, load_s, load_s, log),
        Strategy("swift_logging_parallel", "logging", every, stall, load_s, load_s, spread),
    )
    facts = (
        Fact("machines", machines, "", "given"),
        Fact("mean time between failures of one", mtbf_s / HOUR, "h", "given; exponential"),
        Fact("training time without failure", work_s / HOUR, "h", "given"),
        Fact("checkpoint interval", every, "s", "given, or assumed where it is an hour"),
        Fact("checkpoint stall", stall, "s", "given, or assumed where it is 30 s"),
        Fact("checkpoint load", load_s, "s", "given, or assumed where it is 120 s"),
        Fact("snapshot interval", snapshot_s, "s", "assumed"),
        Fact("snapshot stall", snapshot_stall_s, "s", "assumed: 1 % of the interval"),
        Fact("undo and broadcast", undo_s, "s", "assumed"),
        Fact(
            "replay, logging",
            log,
            "of recomputation",
            "ViT-128/32, 16 groups (§7.1), the less favourable model",
        ),
        Fact("replay, parallel recovery", spread, "of recomputation", "ViT-128/32 (§7.1)"),
        *_startup_facts(cluster),
    )
    return Workload(
        "cluster", work_s, cluster, Exponential(mtbf_s), strategies, "swift_logging_parallel", facts
    )
