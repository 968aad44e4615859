"""The configuration of a run.

A new flag of swift-run is one field of :class:`RunConfig`: the command line, the help text, the check of its
bounds and the way to every worker follow from it. Other checks are in `option_mistakes.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from swift_ft.config import detection_timings as timings
from swift_ft.config.option import option
from swift_ft.errors import UsageError
from swift_ft.network import Certificates
from swift_ft.network.addresses import listen_address

_HIGHEST_PORT = 65535

MOST_ON_A_HOST = 4_096
"""Machines on one host, each of several processes: more would exhaust it before anybody reads a line."""
MOST_WORKERS = 1_000_000
"""Of a job: all participants hold a few facts of each."""

WITHIN = 0.8
"""Part of a limit that a wait within it may take. So whoever waits says itself what has not come, before the
others see no more than that its machine is late."""


class Topic:
    """The topics of a run's options: the headings of ``swift-run --help-all``."""

    MACHINES = "machines and runs"
    FAILURES = "failures and recovery"
    TIMEOUTS = "timeouts, in seconds"
    OUTPUT = "what a run shows and writes"
    SECURITY = "who may take part (docs/security.md)"


def _timeout(default_s: float, help: str) -> Any:
    return option(Topic.TIMEOUTS, default_s, f"{help} (default: {default_s:g})", metavar="S", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The options of one run, as the user gave them. They travel from swift-run to every worker.

    Each field declares its command-line option: ``heartbeat_timeout_s`` is ``--heartbeat-timeout``. A name
    with ``_s`` is in seconds.
    """

    machines: int | None = option(
        Topic.MACHINES,
        None,
        "number of machines to run on this host (with --standalone)",
        metavar="N",
        minimum=1,
        maximum=MOST_ON_A_HOST,
    )
    spares: int = option(
        Topic.MACHINES,
        0,
        "number of spare machines that wait for a loss (with --standalone; default: 0)",
        metavar="N",
        minimum=0,
        maximum=MOST_ON_A_HOST,
    )
    networks: bool = option(
        Topic.MACHINES,
        False,
        "give each machine of this host a network of its own, which faults of --inject can cut and slow down "
        "(with --standalone, on Linux, as root or where a user may be root of a namespace)",
    )
    resume: bool = option(
        Topic.MACHINES, False, "continue from the last checkpoint in the store", same_everywhere=True
    )
    auto_resume: bool = option(
        Topic.MACHINES,
        False,
        "continue from the last checkpoint if the store holds a run, or begin one: for jobs that a scheduler "
        "starts again",
        same_everywhere=True,
    )
    fresh: bool = option(
        Topic.MACHINES,
        False,
        "delete the run in the store and start again from the beginning",
        same_everywhere=True,
    )
    checkpoint_at: int | None = option(
        Topic.MACHINES,
        None,
        "save a checkpoint after iteration N, too: the last one, if checkpoint_every does not divide it",
        metavar="N",
        minimum=1,
        same_everywhere=True,
    )
    check: bool = option(
        Topic.MACHINES,
        False,
        "run two iterations of the script, say how each part of its training is protected and what a loss of "
        "each machine would cost, and leave nothing of its own behind: on this host, with two machines "
        "unless told otherwise (exit code 1: something is not protected)",
    )
    scheduler: str = option(
        Topic.MACHINES,
        "",
        "ask for a machine in place of a lost one where no spare waits, and give back machines that were "
        "asked to leave: slurm, jobset, or command:COMMAND (docs/how-to/schedulers.md; default: off)",
        metavar="SCHEDULER",
    )
    no_replacement: bool = option(
        Topic.MACHINES,
        False,
        "start no machine in the place of one that was killed (with --standalone)",
    )
    plan: str | None = option(
        Topic.MACHINES,
        None,
        "begin with the pipelines, the layers of each stage and the microbatches in FILE, as swift-plan "
        "instantiate --json and swift-plan devices --json print them, for a script with a LayerStack; the "
        "same on all machines",
        metavar="FILE",
        is_path=True,
        same_everywhere=True,
        by_digest=True,
    )
    preload: str = option(
        Topic.MACHINES,
        "",
        "modules that the script imports, separated by commas: a machine imports them once, before it forks "
        "its workers, and a replacement begins with them (not those that read a worker's variables when they "
        "are imported)",
        metavar="MODULES",
    )
    may_differ: str = option(
        Topic.MACHINES,
        "",
        "arguments of the script, variables of its environment and modules that may differ by machine, "
        "separated by commas, such as cache-dir,SCRATCH; all others must be the same on all machines, as far "
        "as the script reads them",
        metavar="NAMES",
        same_everywhere=True,
    )
    relay_fanout: int = option(
        Topic.MACHINES,
        32,
        "machines that read and write the journal through one of them, in a job that has more (default: 32)",
        metavar="N",
        minimum=2,
        maximum=32,
        same_everywhere=True,
    )
    failure_domain: str = option(
        Topic.FAILURES,
        "",
        "the failure domain of this machine, such as its rack: machines of one domain may be lost together, "
        "so memory checkpoints go to a machine of another one. With --standalone, the names of all machines "
        "and then of all spares, separated by commas (default: each machine is a domain of its own)",
        metavar="NAME",
    )
    health_checks: str = option(
        Topic.FAILURES,
        "",
        "what a machine has to show before it takes part, and again after it was lost, separated by commas: "
        "memory, disk, product (of matrices, on each device), devices (their memory), links, clock, or "
        "package.module:function of your own; one that fails stays out (default: none)",
        metavar="CHECKS",
    )
    stragglers: str = option(
        Topic.FAILURES,
        "warn",
        "what becomes of a machine that is persistently slower than its peers: warn says so, rebalance moves "
        "layers of a LayerStack away from it, or gives it fewer samples of GlobalBatches, and replace has a "
        "waiting spare take its place (default: warn)",
        choices=("warn", "rebalance", "replace"),
        same_everywhere=True,
    )
    straggler_factor: float = option(
        Topic.FAILURES,
        1.5,
        "how many times as long as its peers a straggler takes for its own work, at least (default: 1.5)",
        metavar="F",
        above=1,
        same_everywhere=True,
    )
    policy: str = option(
        Topic.MACHINES,
        "off",
        "when the job changes to other machines by itself: advise says which change pays now, and what it "
        "would cost and bring, and auto also makes it (default: off; docs/how-to/policy.md)",
        choices=("off", "advise", "auto"),
        same_everywhere=True,
    )
    policy_machines: str = option(
        Topic.MACHINES,
        "",
        "the fewest and the most machines that --policy may choose, if it may choose; either may be left out "
        "(default: as many as there are)",
        metavar="MIN:MAX",
        same_everywhere=True,
    )
    policy_price: str = option(
        Topic.MACHINES,
        "",
        "the price of one machine for an hour, and the most that the whole training may cost if --policy "
        "chooses dearer machines (default: any price)",
        metavar="HOUR:MOST",
        same_everywhere=True,
    )
    verify: str = option(
        Topic.FAILURES,
        "",
        "in the place of what the script says (Session(verify=...)): digest compares digests of the state at "
        "each checkpoint, replay also computes some steps twice and compares what comes out, bit for bit "
        "(docs/how-to/find-silent-corruption.md), and none compares nothing (default: as the script says)",
        choices=("none", "digest", "replay"),
        same_everywhere=True,
    )
    verify_every: int = option(
        Topic.FAILURES,
        0,
        "iterations between two steps that --verify replay computes twice (default: as the script says, 100)",
        metavar="N",
        minimum=0,
        same_everywhere=True,
    )
    audit: bool = option(
        Topic.FAILURES,
        False,
        "spares that wait compute again what each machine of a pipeline has computed between two "
        "checkpoints, from the checkpoint and the logs, which stay for that long, or what a replica (DDP) "
        "has contributed to the step after a checkpoint; it is compared bit for bit "
        "(docs/how-to/find-silent-corruption.md)",
        same_everywhere=True,
    )
    on_corruption: str = option(
        Topic.FAILURES,
        "",
        "what follows when a verified step or an audit shows that a machine has computed something wrong: "
        "warn says so, drain also asks the machine to leave, stop ends the job, and back has all go back to "
        "the last checkpoint that was audited, and the machine leave (without --audit: as drain; default: as "
        "the script says, warn)",
        choices=("warn", "drain", "stop", "back"),
        same_everywhere=True,
    )
    on_loss: str = option(
        Topic.FAILURES,
        "guest",
        "what follows when no machine comes for a lost one: guest has another machine run its workers, too; "
        "shrink goes on with fewer workers, if the survivors hold all of the state and the script can be "
        "dealt anew, else with a guest (default: guest; docs/how-to/elastic.md)",
        choices=("guest", "shrink"),
        same_everywhere=True,
    )
    inject: str = option(
        Topic.FAILURES,
        "",
        "faults to inject, separated by semicolons, such as 'kill machine=1 iteration=8 point=optimizer' "
        "(swift_ft.faults describes the syntax)",
        metavar="FAULTS",
    )
    heartbeat_timeout_s: float = _timeout(
        timings.HEARTBEAT_TIMEOUT_S, "seconds without a heartbeat after which a worker counts as lost"
    )
    machine_silence_s: float = option(
        Topic.TIMEOUTS,
        timings.MACHINE_SILENCE_S,
        "seconds of silence after which a machine counts as lost, and so does one with a worker that was "
        f"stopped by a signal (default: {timings.MACHINE_SILENCE_S:g})",
        metavar="S",
        above=0,
        same_everywhere=True,
    )
    elastic_wait_s: float = option(
        Topic.TIMEOUTS,
        10.0,
        "seconds to wait for a machine that fills an empty slot, before another machine runs this slot, too "
        "(default: 10)",
        metavar="S",
        minimum=0,
        same_everywhere=True,
    )
    join_timeout_s: float = _timeout(600.0, "seconds to wait for a machine that fills an empty slot")
    report_timeout_s: float = _timeout(
        timings.REPORT_TIMEOUT_S,
        "seconds until every worker has reported its status in a new generation; includes the start of a "
        "replacement's script up to its session",
    )
    rendezvous_timeout_s: float = _timeout(
        timings.STORE_SILENCE_S,
        "seconds that what a recovery needs may wait for a rendezvous store that does not answer; then this "
        "machine ends",
    )
    group_timeout_s: float = _timeout(300.0, "seconds to form a process group")
    replay_timeout_s: float = _timeout(
        timings.REPLAY_TIMEOUT_S, "seconds without progress after which a replay has failed"
    )
    flush_timeout_s: float = _timeout(
        120.0,
        "seconds to flush queued log messages after a failure, to wait for a log segment that a replay "
        "needs, and for the log's last upload at the end of a run",
    )
    checkpoint_timeout_s: float = _timeout(
        3600.0, "seconds to wait for the last checkpoint at the end of a run"
    )
    exit_timeout_s: float = _timeout(
        3600.0,
        "seconds that threads, exit handlers and processes of a script may take once its last line is done",
    )
    max_failures: int = option(
        Topic.FAILURES,
        16,
        "number of machines that may be lost after the last checkpoint; one more ends the job (default: 16)",
        metavar="N",
        minimum=0,
        same_everywhere=True,
    )
    max_machine_failures: int | None = option(
        Topic.FAILURES,
        None,
        "number of losses by its own fault (machine or device) after which a machine is left out, and its "
        "failure domain with it if that is what fails; 0 for never (default: 5; 0 with --standalone, whose "
        "machines are all this one)",
        metavar="N",
        minimum=0,
        same_everywhere=True,
    )
    helpers: int | None = option(
        Topic.FAILURES,
        None,
        "largest number of survivors that help to replay a lost machine, if the script says how to build its "
        "stages (default: the number of microbatches; with --standalone on CPUs, as many as there are other "
        "cores)",
        metavar="N",
        minimum=0,
    )
    metrics_port: int = option(
        Topic.OUTPUT,
        0,
        "serve each machine's metrics to Prometheus, and /healthz to probes, at PORT; with --standalone at "
        "PORT + i for machine i (needs swift-ft[metrics]; default: off)",
        metavar="PORT",
        minimum=0,
        maximum=_HIGHEST_PORT,
    )
    worker_metrics_port: int = option(
        Topic.OUTPUT,
        0,
        "serve each worker's metrics to Prometheus: worker r listens on PORT + r (needs swift-ft[metrics]; "
        "default: off)",
        metavar="PORT",
        minimum=0,
        maximum=_HIGHEST_PORT,
    )
    metrics_address: str | None = option(
        Topic.OUTPUT,
        None,
        "where these two ports listen: an address of this host, or 0.0.0.0 for all of them (default: where "
        "other machines reach this one, 127.0.0.1 with --standalone; for a host's name all of its addresses)",
        metavar="ADDRESS",
    )
    profile_out: str | None = option(
        Topic.OUTPUT,
        None,
        "write the profile that swift-group reads to FILE, after a few iterations",
        metavar="FILE",
        is_path=True,
    )
    layers_out: str | None = option(
        Topic.OUTPUT,
        None,
        "write what each layer of the pipeline costs to FILE, as swift-plan reads it; slows three of the "
        "first iterations",
        metavar="FILE",
        is_path=True,
    )
    events_out: str | None = option(
        Topic.OUTPUT,
        None,
        "write all events and recoveries to FILE as JSON, at the end; on several hosts each launcher with "
        "this flag does",
        metavar="FILE",
        is_path=True,
    )
    events_log: str | None = option(
        Topic.OUTPUT,
        None,
        "append each event that an operator would act on to FILE at once, as a JSON line (docs/events.md); - "
        "for stderr. On several hosts each launcher with this flag does",
        metavar="FILE",
        is_path=True,
    )
    on_event: str | None = option(
        Topic.OUTPUT,
        None,
        "run COMMAND in a shell for each warning or error among these events, and for the run's end, with "
        "the JSON line on stdin; one launcher does so for each event of the journal",
        metavar="COMMAND",
    )
    endpoint_out: str | None = option(
        Topic.OUTPUT,
        None,
        "write the rendezvous store's address and the run's name to FILE",
        metavar="FILE",
        is_path=True,
    )
    quiet: bool = option(
        Topic.OUTPUT,
        False,
        "print no losses, recoveries and waits on the console; warnings and the reason of a failure stay",
    )
    token_file: str | None = option(
        Topic.SECURITY,
        None,
        "read the job's token from FILE, one line that only its owner can read; the same on all machines. "
        "Without it, the variable SWIFT_FT_TOKEN (default: --standalone makes a secret of its own; "
        "on several hosts one is agreed on through the rendezvous store)",
        metavar="FILE",
        is_path=True,
    )
    tls_cert: str | None = option(
        Topic.SECURITY,
        None,
        "encrypt what agents and workers send each other; FILE is this machine's certificate, as PEM. "
        "torch's own process groups and the rendezvous store stay as they are (default: not encrypted)",
        metavar="FILE",
        is_path=True,
    )
    tls_key: str | None = option(
        Topic.SECURITY,
        None,
        "private key of --tls-cert, without a password",
        metavar="FILE",
        is_path=True,
    )
    tls_ca: str | None = option(
        Topic.SECURITY,
        None,
        "certificates of the authority that signed the machines' certificates",
        metavar="FILE",
        is_path=True,
    )

    def domain_of(self, index: int) -> str:
        """The failure domain of a machine, by its number on this host; empty if it is one of its own."""
        names = self.failure_domain.split(",")
        return names[index % len(names)].strip()

    def metrics_listen_address(self, host: str) -> str:
        """The address on which a host serves metrics that others reach at ``host``; empty for all of them."""
        return listen_address(host) if self.metrics_address is None else self.metrics_address

    @property
    def preloaded(self) -> tuple[str, ...]:
        """The modules of ``--preload``."""
        return tuple(name.strip() for name in self.preload.split(",") if name.strip())

    @property
    def different(self) -> tuple[str, ...]:
        """The names of ``--may-differ``."""
        return tuple(name.strip() for name in self.may_differ.split(",") if name.strip())

    @property
    def policy_limits(self) -> tuple[int, int | None]:
        """The fewest machines that the policy may choose, and the most; None for any number.

        Raises:
            UsageError: it is another text.
        """
        if not self.policy_machines:
            return 1, None
        match = re.fullmatch(r"(\d*):(\d*)", self.policy_machines)
        least, most = (int(text) if text else None for text in match.groups()) if match else (0, 0)
        if not (least or 1) <= (most or MOST_WORKERS) or 0 in (least, most):
            raise UsageError(
                f"--policy-machines {self.policy_machines!r}: give the fewest and the most machines, "
                "such as 2:6."
            )
        return least or 1, most

    @property
    def policy_prices(self) -> tuple[float, float] | None:
        """The price of a machine for an hour, and the most for the whole training; None for any price.

        Raises:
            UsageError: it is another text.
        """
        if not self.policy_price:
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", self.policy_price)
        hour, most = map(float, match.groups()) if match else (0.0, 0.0)
        if not (0 < hour < math.inf and 0 < most < math.inf):
            raise UsageError(
                f"--policy-price {self.policy_price!r}: give the price of a machine for an hour, and the "
                "most for the whole training, such as 2.50:400."
            )
        return hour, most

    # One machine's waits while all others wait for it. A user may have set the others' limit below what this
    # machine would wait at most: each of its waits is no longer than these.

    @property
    def within_report_s(self) -> float:
        """The longest wait of a worker that is about to report."""
        return WITHIN * self.report_timeout_s

    @property
    def within_replay_s(self) -> float:
        """The longest wait of a worker in its task of a recovery."""
        return WITHIN * self.replay_timeout_s

    @property
    def worker_beat_s(self) -> float:
        """The time between two heartbeats of a worker: several in the silence that is allowed."""
        return min(timings.WORKER_BEAT_S, self.heartbeat_timeout_s / timings.BEATS)

    @property
    def on_one_host(self) -> bool:
        """Whether all machines are on this host, and so share its processors."""
        return self.machines is not None

    @property
    def certificates(self) -> Certificates | None:
        """The files for TLS; None without."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return Certificates(self.tls_cert, self.tls_key, self.tls_ca)
