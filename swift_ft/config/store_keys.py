"""Every kind of key in the rendezvous store: what is in it, who sets it, who reads it, and until when.

No other file of the package makes a key, so two parts of it cannot take the same one by accident. Tools of
another version look at running jobs, and would not find a key that is spelled in another way.

A client of the store is confined to a namespace, most often that of one run: :func:`prefix_of` that is what
its keys begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

Hex: TypeAlias = str
"""Lower-case hexadecimal digits. Any other text in a key is free of slashes."""
PathText: TypeAlias = str
"""Text that may have slashes."""

_Make = TypeVar("_Make", bound=Callable[..., str])


def prefix_of(namespace: str) -> str:
    """The beginning of a client's keys, before a slash; the namespace is a run, or one of the next two."""
    return f"swift/{namespace}"


def runs_of(name: str) -> str:
    """The namespace that says which run of a name (``--rdzv-id``) is the newest."""
    return f"{name}/runs"


NAMES_OF_RUNS = "names-of-runs"
"""The namespace that lists the names of all runs in the store. No run has this name: a run's has a number."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of key.

    Attributes:
        make: returns the key; its docstring says what is in it.
        set_by: who sets it.
        read_by: who reads it.
        until: how long it is of use. Only what is said to be deleted is gone then.
        namespace: of the clients that use it, or the folder of a process group in it.
    """

    make: Callable[..., str]
    set_by: str
    read_by: str
    until: str
    namespace: str


KINDS: list[Kind] = []
"""In the order of this file."""

_GROUPS = "RUN/groups/GENERATION"


def _kind(
    set_by: str, read_by: str, until: str = "the run ends", *, namespace: str = "RUN"
) -> Callable[[_Make], _Make]:
    def declare(make: _Make) -> _Make:
        KINDS.append(Kind(make, set_by, read_by, until, namespace))
        return make

    return declare


# ------------------------------------------------------------------------------------------------- runs


@_kind("launchers that begin a run", "launchers, tools", "the next run begins", namespace=runs_of("NAME"))
def newest_run() -> str:
    """The newest run of a name, or ``closed``: the store ends with that one."""
    return "newest"


@_kind(
    "launchers that begin the first run of a name", "each other", "the store ends", namespace=NAMES_OF_RUNS
)
def count_of_names() -> str:
    """The number of names in the list."""
    return "count"


@_kind(
    "launchers that begin the first run of a name", "the next ones", "the store ends", namespace=NAMES_OF_RUNS
)
def name_of_run(number: int) -> str:
    """A name. A new one is compared with the newest: it may be mistyped."""
    return str(number)


@_kind("the launcher that begins a run; agents that restore it", "each client, on each connection")
def incarnation() -> str:
    """Unlike any other: a store without it was restarted (`coordination/incarnations.py`)."""
    return "incarnation"


@_kind("each client of etcd", "itself, in each write")
def writer(client: Hex) -> str:
    """The number of its last write, so that each is carried out once."""
    return f"~writers/{client}"


@_kind("agents", "launchers that find the run", "the next sign of life")
def sign_of_life() -> str:
    """Changes as long as any machine lives."""
    return "sign-of-life"


@_kind("agents, when the run is over", "the process that serves the store")
def over() -> str:
    """The store may end."""
    return "over"


@_kind("the first launcher that was given no token", "all launchers")
def job_secret() -> str:
    """The token that they agree on."""
    return "job-secret"


# ----------------------------------------------------------------------------------------------- agents


@_kind("agents of a large job", "each other", "the job has formed")
def meeting_tickets() -> str:
    """The number of tickets that were taken (`coordination/meeting.py`)."""
    return "meeting/tickets"


@_kind("the agent with this ticket", "agents that go through it", "the job has formed")
def met(ticket: int) -> str:
    """The machine, and the address of its port."""
    return f"meeting/{ticket}"


@_kind("agents and workers that go to the store", "each other", "a snapshot covers it; deleted")
def journal_block(incarnation: Hex, number: int) -> str:
    """Events that were written at once."""
    return f"{_journal(incarnation)}/{number}"


@_kind("the agent of the lowest slot", "who writes or reads blocks", "the journal is shortened again")
def journal_first(incarnation: Hex) -> str:
    """The number of the first block that was not deleted."""
    return f"{_journal(incarnation)}/first"


@_kind("the agent of the lowest slot", "the one that does so next", "the journal is shortened again")
def journal_lowest(incarnation: Hex) -> str:
    """The number of the first block that may still be there."""
    return f"{_journal(incarnation)}/lowest"


@_kind("the agent that republishes the journal", "each client, when it comes to this store")
def journal_end(incarnation: Hex) -> str:
    """The number after the blocks that were republished."""
    return f"{_journal(incarnation)}/end"


@_kind("the agent of the lowest slot", "newcomers", "the next snapshot")
def journal_snapshot(incarnation: Hex) -> str:
    """The number of the newest snapshot; in etcd also its number of pieces."""
    return f"{_journal(incarnation)}/snapshot"


@_kind("the agent of the lowest slot", "newcomers", "the next snapshot; deleted")
def journal_snapshot_text(incarnation: Hex, number: int) -> str:
    """The state to which the blocks before a number lead."""
    return f"{journal_snapshot(incarnation)}/{number}"


@_kind("agents and workers that go to etcd", "each other", "a snapshot covers it; deleted")
def journal_block_named(name: str) -> str:
    """A block in etcd, which numbers them by their revisions."""
    return f"{_journal('')}/blocks/{name}"


@_kind("the agent of the lowest slot", "newcomers", "the next snapshot; deleted")
def journal_snapshot_piece(number: int, index: int) -> str:
    """A piece of a snapshot in etcd, which takes no large values."""
    return f"{journal_snapshot('')}/{number:020}/{index:06}"


@_kind("workers and agents that archive the journal", "the agent that deletes blocks")
def journal_archived() -> str:
    """The position up to which it is archived."""
    return "journal/archived"


@_kind("agents in a store that was restarted", "each other", "the store is restored")
def restore_offer(machine: str) -> str:
    """The number of blocks of the journal that this machine has read."""
    return f"restore/offer/{machine}"


@_kind("agents in a store that was restarted", "each other", "the store is restored")
def restore_lost(machine: str) -> str:
    """Set if another machine has seen this one die: no offer is waited for."""
    return f"restore/lost/{machine}"


@_kind("the holder of a machine's keys", "the agent that restores the store", "the store is restored")
def restore_kept(machine: str) -> str:
    """Set once the keys of this machine, which may be lost, are there again."""
    return f"restore/kept/{machine}"


@_kind("the head of all machines of a job with heads", "workers, views", "the next second")
def notes_of_group(group: int) -> str:
    """The newest facts of some machines, such as their workers' progress."""
    return f"notes/group/{group}"


@_kind("each agent of a job without heads", "workers, views", "the next second")
def notes_of_slot(slot: int) -> str:
    """The newest facts of a machine."""
    return f"notes/slot/{slot}"


@_kind("the first launcher that has `--on-event`", "the others")
def hook(position: int, event: str) -> str:
    """The launcher that runs the command for an event of the journal."""
    return f"hook/{position}/{event}"


@_kind("the machine that serves it", "machines that start workers then", "the next generation")
def bootstrap(generation: int, machine: str) -> str:
    """The address of the store for ``init_process_group``."""
    return f"bootstrap/{generation}/{machine}"


@_kind("the machine of its slot 0", "machines that start workers of it", "another one is planned")
def bootstrap_of_world(world: int) -> str:
    """The address of the store for ``init_process_group`` in a world that is to take over."""
    return f"bootstrap/world-{world}"


@_kind("nobody: none of torchelastic's barriers is left", "nobody", "the next generation")
def agents(generation: int) -> str:
    """The folder that torchelastic is given."""
    return f"agents/{generation}"


# --------------------------------------------------------------------------------------- process groups


@_kind("torch", "torch", "the next generation")
def groups(generation: int) -> str:
    """The folder in which all workers form their groups."""
    return f"groups/{generation}"


@_kind("torch", "torch", "the replay is over")
def replays(name: str) -> str:
    """The folder in which workers that replay together form theirs."""
    return f"replays/{name}"


@_kind("torch", "torch", "the next generation", namespace=_GROUPS)
def own_group(number: int, members: Hex) -> str:
    """The name of a group that the script does not know; in a replay's folder, too."""
    return f"own/{number}/{members}"


@_kind("torch", "torch", "the replay is over", namespace=_GROUPS)
def present_group(group: str, members: Hex) -> str:
    """The name of a group of those members of one of the script's who replay together."""
    return f"present/{group}/{members}"


@_kind(
    "each member of a group", "its members, before their communicator forms", "the group", namespace=_GROUPS
)
def members(group: str) -> str:
    """The meeting of those that form a communicator: how many have come, and that all have."""
    return f"members/{group}"


@_kind("each worker that begins to form groups", "workers that wait for it in vain", "the next generation")
def joining(generation: int, rank: int) -> str:
    """Set: this worker did come."""
    return f"{groups(generation)}/here/{rank}"


# --------------------------------------------------------------------------------- workers: the beginning


@_kind("worker 0", "the other workers; its replacement")
def claimed() -> str:
    """The checkpoints in the run's own store, which belongs to this run from now on."""
    return "claimed"


@_kind("worker 0 of a world that trains", "workers of the next world", "the next world trains")
def topology() -> str:
    """The shape of the job that trains: which other ones can take its state over."""
    return "topology"


@_kind("the first worker that begins", "all workers")
def program() -> str:
    """The settings of its session, and digests of the script's modules."""
    return "program"


@_kind("each worker", "its replacement")
def program_of(rank: int) -> str:
    """The rest of its program: the seed, the names in its state, modules that others do not have."""
    return f"program/{rank}"


@_kind("the worker that got it", "its replacement")
def setup_result(operation: Hex, number: int, receiver: str) -> str:
    """The result of an operation before the script's first step, for one rank or for ``all``."""
    return f"setup/{operation}/{number}/{receiver}"


@_kind("the first worker of a rank", "its replacements")
def made(rank: int) -> str:
    """Digests of the tensors that its script made and no state holds."""
    return f"made/{rank}"


# ----------------------------------------------------------------------------------------- workers: steps


@_kind("the first worker that trains", "all workers")
def between_parts() -> str:
    """The functions that were given to ``session.between()``."""
    return "between/parts"


@_kind("the first worker that has it", "the others; replays")
def between_result(iteration: int, position: int) -> str:
    """The generation, and what a function between two steps returned."""
    return f"between/{iteration}/{position}"


@_kind("each worker of a pipeline", "its replacement, in a replay")
def between_changes(iteration: int, position: int, rank: int) -> str:
    """Changes of such a function in attributes of modules, and the names of those that were too large."""
    return f"between/{iteration}/{position}/changes/{rank}"


@_kind("each worker, at checkpoints", "its replacement", "a later checkpoint is committed; deleted")
def saved_digests(rank: int, iteration: int) -> str:
    """Digests of the state that it saved."""
    return f"digests/saved/{rank}/{iteration}"


@_kind("the first replica that comes to a checkpoint", "the others", "the next checkpoint; deleted")
def replica_digests(epoch: int, generation: int, iteration: int, part: str) -> str:
    """Digests of a layer, or of all that they hold."""
    return f"digests/{epoch}/{generation}/{iteration}/{part}"


@_kind("each worker, at its first batch and the first other one", "its replacement")
def first_batch(rank: int) -> str:
    """The digest of its first batch, and whether a later one was another one."""
    return f"batches/{rank}/first"


@_kind("each worker", "its replacement")
def last_batches(rank: int) -> str:
    """The highest number for the next kind."""
    return f"batches/{rank}/last"


@_kind("each worker", "its replacement", "a checkpoint after them is committed; deleted")
def batches(rank: int, number: int) -> str:
    """Digests of the batches in 64 iterations."""
    return f"batches/{rank}/{number}"


@_kind("the worker that reads it", "others that need it", "it is offered")
def samples_reader(digest: Hex) -> str:
    """The worker that reads a file of samples from where it is stored."""
    return f"samples/{digest}/reader"


@_kind("each worker that has it", "others that need it")
def samples_at(digest: Hex) -> str:
    """The address and the machine of the worker that had the file last."""
    return f"samples/{digest}/at"


@_kind("the first worker of a DDP group that knows", "replacements in the group")
def ddp_layout(first: int) -> str:
    """The buckets of gradients, and since which iteration. The group is named by its lowest rank."""
    return f"ddp/layout/{first}"


@_kind("the first worker of a DDP group that knows", "the group of the next world")
def ddp_layout_of(signature: Hex) -> str:
    """The same, for as many replicas of such parameters in another world."""
    return f"ddp/layouts/{signature}"


@_kind("the workers of a DDP group", "replacements in the group")
def ddp_own_buffers(first: int) -> str:
    """The first iteration in which each has buffers of its own."""
    return f"ddp/own-buffers/{first}"


@_kind("each worker with replicas", "its replicas")
def variables(rank: int) -> str:
    """Digests of its script's variables in the third step of a generation."""
    return f"variables/{rank}"


@_kind("each worker with replicas", "its replacement")
def generators(rank: int) -> str:
    """Digests of the states of its script's generators before its first step."""
    return f"variables/generators/{rank}"


@_kind("each worker with replicas", "its replacement")
def variables_kept(rank: int) -> str:
    """Digests of its script's variables, and small ones themselves, as of its last checkpoints."""
    return f"variables/kept/{rank}"


@_kind("the first process of each worker", "its replacement, and that of a worker of another machine")
def start_values(rank: int) -> str:
    """Digests of what its script has set before the session's start, and small values themselves."""
    return f"variables/start/{rank}"


# -------------------------------------------------------------------------------- workers: the pipeline


@_kind("the worker of the stage", "its replacement")
def shapes(stage: int, layout: Sequence[int] = ()) -> str:
    """The shapes of a stage's messages; once layers have moved, with the number of layers of each stage."""
    return f"stage/{stage}/{'-'.join(map(str, layout))}" if layout else f"stage/{stage}"


@_kind("a worker whose script does so", "workers that could be helped")
def several_calls() -> str:
    """Set: the schedule is called several times in a step."""
    return "pipeline/several-calls"


@_kind("each worker, before it communicates", "its replacement; others")
def script_together(rank: int) -> str:
    """The workers with which it has to replay, and the call that demands it."""
    return f"script/together/{rank}"


@_kind("each worker", "`session.plan()`")
def script_groups(rank: int) -> str:
    """The groups of its script, and the use that it makes of them."""
    return f"script/groups/{rank}"


@_kind("the worker that warns", "others that would")
def script_warned() -> str:
    """The number of workers that have found that only all can replay together."""
    return "script/warned"


@_kind("each survivor, before it reports", "workers that replay", "training goes on; deleted")
def log_offer(asked_in: int, rank: int) -> str:
    """The address of its server, its machine, and the names of segments of its log."""
    return f"log/{asked_in}/{rank}"


@_kind("each survivor, before it reports", "workers that load", "training goes on; deleted")
def part_offer(asked_in: int, part: PathText) -> str:
    """The address and the machine of a server that has a copy of this part of a checkpoint."""
    return f"parts/{asked_in}/{part}"


# ----------------------------------------------------------------------- workers: memory and measurements


@_kind("each worker", "workers that send copies", "it is replaced")
def memory_address(rank: int) -> str:
    """The address at which it takes copies of others' states."""
    return f"memory/address/{rank}"


@_kind("worker 0", "all workers")
def memory_interval() -> str:
    """With ``"auto"``: the iterations between two copies, and the first one for which that holds."""
    return "memory/interval"


@_kind("each worker whose copy is held", "each other", "a newer copy is complete; deleted")
def memory_held(generation: int, iteration: int) -> str:
    """The number of copies that are held."""
    return f"{memory_verdict(generation, iteration)}/held"


@_kind("the first worker that knows", "all workers", "a newer copy is complete; deleted")
def memory_verdict(generation: int, iteration: int) -> str:
    """``complete``, or ``skipped``."""
    return f"memory/{generation}/{iteration}"


@_kind("each worker", "those that plan", "it holds other layers")
def place(rank: int) -> str:
    """Its stages, parts and pipeline."""
    return f"place/{rank}"


@_kind("each worker, once", "those that plan")
def profile(rank: int) -> str:
    """Times of its iterations, and bytes that it sends."""
    return f"profile/{rank}"


@_kind("each worker, once", "worker 0")
def layers(rank: int) -> str:
    """Times and sizes of its layers."""
    return f"layers/{rank}"


def of_world(world: int, key: PathText) -> str:
    """A worker's key in a world but the first: all its workers are others, whatever their ranks."""
    return f"world/{world}/{key}" if world else key


def _journal(incarnation: Hex) -> str:
    """The journal's folder in one incarnation of the store; empty for a store without incarnations."""
    return f"journal/{incarnation}" if incarnation else "journal"
