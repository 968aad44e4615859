"""What is measured: of each subject its title, the command that measures it, the figures to show first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pick:
    """One figure of a run's tables, for the page of today's figures.

    Attributes:
        words: what the page says of it.
        row: as the table names it.
        column: as the table names it.
        occurrence: 2 for the second row of this name.
    """

    words: str
    row: str
    column: str
    occurrence: int = 1


@dataclass(frozen=True, slots=True)
class Subject:
    """What a benchmark measures.

    Attributes:
        title: for pages.
        command: that measures it: a module of ``benchmarks``, or a target of make. None if no script does.
        shown: what the page of today's figures shows, beside the targets that were missed: names of targets,
            and figures.
        why_no_command: how it was measured, where there is no command.
    """

    title: str
    command: str | None
    shown: tuple[Pick | str, ...] = ()
    why_no_command: str = ""


_AFTER_25 = "25 iterations after the checkpoint"


SUBJECTS = {
    # ------------------------------------------------------------------------------------------ recovery
    "recovery": Subject(
        "Recovery",
        "benchmarks.recovery.recovery",
        (
            f"kill to live, without the replay, {_AFTER_25}",
            f"replay / pure compute, {_AFTER_25}",
            f"faster than torchrun + DCP, with helpers, {_AFTER_25}",
        ),
    ),
    "parallel-recovery": Subject(
        "Parallel recovery",
        "benchmarks.recovery.parallel",
        (Pick("replay with one helper / alone", "replay / with alone", "1 helper"),),
    ),
    "replication": Subject(
        "Replication",
        None,
        why_no_command="its command is gone: *Beside other systems* measures four replicas, and more peers",
    ),
    "peers": Subject(
        "Beside other systems",
        "make bench-peers",
    ),
    "peers-some": Subject(
        "Beside some of them, measured more often", "benchmarks.peers.table --systems NAME"
    ),
    "memory-checkpoints": Subject(
        "Memory checkpoints", "benchmarks.recovery.memory", ("torchrun's recovery / ours",)
    ),
    "imports": Subject(
        "A script that imports much",
        "benchmarks.recovery.imports",
        (Pick("kill to all live, as it comes", "as it comes", "kill to all live"),),
    ),
    "groups": Subject(
        "Groups made anew, or reconfigured by torch",
        "benchmarks.recovery.groups",
    ),
    "audits": Subject(
        "Spares that audit",
        "benchmarks.recovery.audits",
        ("kill to live with a spare that audits / that waits",),
    ),
    "verification": Subject("The speed of verification", "benchmarks.recovery.verify"),
    # ------------------------------------------------------------------------------- the price of a step
    "overhead": Subject(
        "Overhead",
        "benchmarks.logging.overhead",
        ("logging: logged / unlogged, iteration time",),
    ),
    "ddp-step": Subject(
        "What a DDP step pays for",
        None,
        why_no_command="short runs of `examples/train_ddp.py` and its plain counterpart in turns, by hand",
    ),
    "transactions": Subject(
        "Failure-free steps, before and after notes of all that a step may change",
        None,
        why_no_command="`benchmarks.logging.overhead` of two commits in turns, by hand; `benchmarks.against` "
        "compares two checkouts",
    ),
    "against": Subject(
        "This checkout against the one before",
        "benchmarks.against",
    ),
    "step-notes": Subject("What a step notes", "benchmarks.recovery.step"),
    "script-collectives": Subject(
        "Logging what a script communicates",
        "benchmarks.logging.collectives",
    ),
    "proof": Subject(
        "Proof",
        "benchmarks.proof.overhead",
        ("transformer, 4 layers 512 wide: all digests, a checkpoint every 100 iterations",),
    ),
    "undo": Subject(
        "Undo",
        "benchmarks.undo.undo",
        ("20M adamw foreach: step / plain step",),
    ),
    "packing": Subject("Packing the log", "benchmarks.logging.codec"),
    "log-throughput": Subject(
        "Throughput of the log",
        "benchmarks.logging.throughput",
    ),
    # ------------------------------------------------------------------------------------ fewer machines
    "layout-change": Subject("A change of the layout", "benchmarks.elastic.change"),
    "worlds": Subject("A running job is changed", "benchmarks.elastic.worlds"),
    "slow-machine": Subject(
        "A slow machine",
        "benchmarks.elastic.straggler",
    ),
    "machine-count": Subject(
        "How many machines",
        "benchmarks.elastic.size",
    ),
    "smaller-forecast": Subject(
        "The forecast of a job with one machine less",
        "benchmarks.elastic.forecast",
    ),
    "layer-replicas": Subject("Pipelines that are replicas", "benchmarks.elastic.replicas"),
    "loss-beside-torchft": Subject(
        "After a loss, beside torchft",
        "benchmarks.elastic.replicas --losses-only",
        (
            Pick("speed left of six machines", "layers have moved, too", "speed left"),
            Pick("the same, torchft", "torchft 0.2.0", "speed left"),
        ),
    ),
    "noise": Subject("An hour of noise", "benchmarks.elastic.noise"),
    # ------------------------------------------------------------------------------------------ planning
    "grouping": Subject("Grouping", "benchmarks.planning.grouping"),
    "layouts": Subject("Layouts", "benchmarks.planning.layouts"),
    "layout-moves": Subject("Moves between layouts", "benchmarks.planning.moves"),
    "tenplex": Subject("The changes that Tenplex measures", "benchmarks.planning.tenplex"),
    "large-change": Subject(
        "A change of 70 billion parameters",
        "benchmarks.planning.links",
        ("slowest change over NVLink and InfiniBand, of DynaTrain's 2 s",),
    ),
    "autohet": Subject("AutoHet's recoveries", "benchmarks.planning.autohet"),
    "unlike-devices": Subject("Pipelines of unlike devices", "benchmarks.planning.devices"),
    "oobleck": Subject("Oobleck's Tables 2 and 4", "benchmarks.planning.elastic", ("one loss in 10 min",)),
    "simulated": Subject("Simulated and executed", "benchmarks.planning.simulated"),
    "paper": Subject(
        "Figures 9 to 11 and table 3 of the paper",
        "benchmarks.paper.figures",
    ),
    # --------------------------------------------------------------------------------------------- scale
    "protocol": Subject(
        "The pure protocol, by job size",
        "benchmarks.recovery.protocol",
    ),
    "control-plane": Subject(
        "The control plane, by job size",
        "benchmarks.scale.control_plane",
        ("1,024 machines, from the loss to the last order, on two cores",),
    ),
    "scale-simulated": Subject(
        "Ten thousand machines, simulated",
        "benchmarks.scale.simulated",
        ("16,384 machines, from a silent loss to the last order, without the replay",),
    ),
    "forming": Subject("Forming a job, by its size", "benchmarks.scale.forming"),
    "silent-machines": Subject(
        "Silent machines",
        "benchmarks.scale.detection",
        ("a silent machine is seen, by default settings",),
    ),
    "strangers": Subject(
        "Strangers at the ports",
        "benchmarks.scale.strangers",
    ),
    "stalled-store": Subject(
        "A stalled rendezvous store",
        "benchmarks.scale.stalled_store",
    ),
    # --------------------------------------------------------------------------------------- correctness
    "campaign": Subject("A campaign of random faults", "benchmarks.recovery.campaign"),
    "orders": Subject("Orders of failures", "benchmarks.proof.orders"),
    "mutants": Subject("Faults planted in the protocol", "make mutants"),
    "chaos": Subject("Random faults of all kinds", "benchmarks.recovery.campaign --faults all", ("wrong",)),
    "changes-chaos": Subject("Changes of a running job, and faults", "make chaos-changes"),
    "soak": Subject("A failure each half minute", "benchmarks.recovery.soak", ("counts that grow",)),
    "nccl-like": Subject("NCCL-like matrix", "make test-nccl-like"),
    "theirs": Subject("Other people's trainers", "make test-theirs"),
    "releases": Subject("Other releases of torch and of Python", "make test-torch"),
    "gpu-tests": Subject("Tests on a GPU", "make test-gpu"),
    "gpu": Subject("On a GPU", "benchmarks.gpu.figures"),
    "gpu-logging": Subject("Logging on a GPU", "benchmarks.gpu.bubbles"),
}
"""By name, as the names of files in ``benchmarks/results/`` have it, in the order of the pages."""
