"""``swift-run``: torchrun's flags, and machines that may die."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from swift_ft.cli.start import answer_quick_questions, end_as_usual, end_with_a_line

if __name__ == "__main__":  # else ``swift-run`` has done it
    end_with_a_line()
    answer_quick_questions()
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # closed connections are expected: no warnings

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import get_args_parser

from swift_ft.cli.console import LauncherConsole
from swift_ft.cli.first_help import SWIFT_RUN, add_version, shorten_help
from swift_ft.cli.live import add_status_option, show_status
from swift_ft.cli.options import HelpFormatter, add_options, config_from
from swift_ft.cli.script_arguments import parse_before_script
from swift_ft.cli.torchrun_options import check_program, launch_config, machines_in
from swift_ft.cli.words import missed_in_words
from swift_ft.config.exit_codes import EXIT_KEPT_OUT, EXIT_USAGE
from swift_ft.config.option_mistakes import check_domains
from swift_ft.config.run_config import MOST_ON_A_HOST, MOST_WORKERS, RunConfig
from swift_ft.config.run_plan import plan_from_json
from swift_ft.config.store_address import ETCD, TCP, StoreAddress
from swift_ft.coordination.journal_reader import Excerpt
from swift_ft.coordination.runs import find_run
from swift_ft.coordination.store_client import connect
from swift_ft.errors import KeptOutError, RendezvousLostError, SwiftError, UsageError
from swift_ft.faults import Fault, check_faults, missed_faults
from swift_ft.host.networks import become_root_for, lacking
from swift_ft.launch.cluster import Cluster
from swift_ft.launch.detection.abandoned_runs import closer_of_abandoned_runs
from swift_ft.launch.detection.kernel import warn_if_ended_together
from swift_ft.launch.health.gate import check_names
from swift_ft.launch.log_handlers import show_log
from swift_ft.launch.machine import run_machine
from swift_ft.launch.processes.main_module import search_path
from swift_ft.launch.rendezvous.job_secret import agreed_secret, given_secret
from swift_ft.launch.rendezvous.setup import is_readable_file
from swift_ft.launch.rendezvous.store_service import StoreService, is_listening
from swift_ft.launch.schedulers.choice import check_scheduler
from swift_ft.launch.settings import AgentSettings, MachineJob
from swift_ft.launch.signals import choose_stop_signals, ending_with_a_line
from swift_ft.network import JobSecret
from swift_ft.network.addresses import is_this_host, own_address
from swift_ft.program.discovery import keep_program
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State, Verdict
from swift_ft.torch_adapters.seams import warn_if_newer
from swift_ft.torch_adapters.versions.launch_options import add_missing_options

_EMBEDDED = StoreAddress.tcp("127.0.0.1", 0)
"""The store that a standalone run starts itself: at a free port."""

_MACHINE_FAILURES = 5
"""A machine that was lost three times is the last to be used: it had two more chances."""

_LOGS = "swift-logs"
_STORE_ENDS_S = 10.0
_POLL_S = 0.2


def run_and_exit() -> NoReturn:
    """The command ``swift-run``. Threads may be blocked in the rendezvous store: no interpreter shutdown."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


_MODULE = "swift_ft.cli.run"
"""This one, also where it is called as a command."""


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, the script's own, or one of `config/exit_codes.py`."""
    args = parse_before_script(parser(), sys.argv[1:] if argv is None else argv)
    end_as_usual(at_once=args.status is not None)
    show_log("swift-run")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # workers' lines, also into a pipe, as they come
    try:
        if args.status is not None:
            return _status(args)
        if args.networks and not lacking():  # before anything is made or said, which would be so twice
            become_root_for(["-m", _MODULE, *(sys.argv[1:] if argv is None else argv)])
        return _check(args) if args.check else _run(args)
    except UsageError as error:
        for line in str(error).splitlines():  # one per mistake
            print(f"swift-run: {line}", file=sys.stderr)
        return EXIT_USAGE
    except SwiftError as error:
        print(f"swift-run: {error}", file=sys.stderr)
        if isinstance(error, KeptOutError):
            return EXIT_KEPT_OUT
        return 1 if args.status is None else EXIT_USAGE
    except KeyboardInterrupt:  # before the run has begun
        print("swift-run: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


_DESCRIPTION = """\
Start a distributed training run that survives the loss of machines. swift-run takes
torchrun's flags. A script with a swift_ft.Session recovers and loses no progress; any
other script is restarted as torchrun restarts it."""

_EXAMPLES = """\
examples:
  four machines and a spare, as processes of this host:
    swift-run --standalone --machines 4 --spares 1 train.py --lr 0.1

  on each of several hosts; those beyond four wait as spares:
    swift-run --nnodes 4 --rdzv-endpoint host0:29400 --rdzv-id job7 train.py

  the same with a rendezvous store that outlives its machines:
    swift-run --nnodes 4 --rdzv-backend etcd-v3 --rdzv-endpoint a:2379,b:2379,c:2379 \\
        --rdzv-id job7 train.py

  continue from the last checkpoint in the script's store:
    swift-run --nnodes 4 --rdzv-endpoint host0:29400 --rdzv-id job7 --resume train.py

  see in two iterations what is protected, and what to change:
    swift-run --check --machines 4 train.py

  kill a machine, to see whether the script survives it:
    swift-run --standalone --machines 4 --spares 1 \\
        --inject "kill machine=1 iteration=47" train.py

  watch a run from anywhere:
    swift-run --status job7 --rdzv-endpoint host0:29400

exit codes:
  0      the run is complete
  1      the run gave up, or a fault of --inject never struck; one line says why
  2      a mistake that you can fix; one line per mistake
  78     this machine is kept out: it differs from the others, fails a health check, or was
         lost too often
  other  the exit code of the script that failed
"""


def parser() -> argparse.ArgumentParser:
    """The command line: torchrun's, and one flag per field of the configuration."""
    parser = get_args_parser()
    parser.prog = "swift-run"
    parser.usage = "%(prog)s [options] script.py [arguments of the script]"
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.formatter_class = HelpFormatter
    parser._optionals.title = "torchrun's options"
    add_missing_options(parser)
    parser.set_defaults(tee="3", log_dir=_LOGS, shutdown_timeout=5)
    for action in parser._actions:
        if action.dest == "shutdown_timeout":  # torchrun's text names its own default
            action.help = "Seconds that workers have to end by themselves before they get SIGKILL."
    add_options(parser)
    add_status_option(parser)
    shorten_help(parser, SWIFT_RUN)
    add_version(parser)
    return parser


def _status(args: argparse.Namespace) -> int:
    if args.training_script is not None:
        raise UsageError("--status shows a run that exists and takes no script: omit one of the two.")
    if not args.rdzv_endpoint:
        raise UsageError(
            "--status needs the --rdzv-endpoint of the run's launchers: --endpoint-out writes it to a file."
        )
    show_status(args.status, _store_address(args))
    return 0


def _check(args: argparse.Namespace) -> int:
    """Two iterations, in a temporary folder. Only who asks imports the table."""
    from swift_ft.cli.check import CheckRun, adjust

    adjust(args)
    with CheckRun() as check:
        if args.log_dir == _LOGS:
            args.log_dir = check.logs()
        text, code = check.conclude(_run(args, check.path))
    print(text, end="\n" if text else "")
    return code


def _run(args: argparse.Namespace, check: str = "") -> int:
    warn_if_newer()
    warn_if_ended_together()
    config = config_from(args)
    if not args.no_python and not args.module and not is_readable_file(args.training_script):
        hint = " To scale a running job: swift-recover scale." if args.training_script == "scale" else ""
        raise UsageError(f"There is no script {args.training_script!r}: check the path.{hint}")
    if args.no_python:
        if config.preloaded:
            raise UsageError("--preload is of no use to a program that is started with --no-python: omit it.")
        check_program(args.training_script)
    else:  # from now on an edit of its files changes nothing for this run
        search = search_path(args.training_script, as_module=args.module)
        keep_program(args.training_script, search, as_module=args.module)
    standalone = args.standalone or config.machines is not None or args.nnodes in ("1", "1:1")
    least, most = machines_in(args.nnodes)
    machines = config.machines or most
    if standalone and machines > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does for several workers on a host
    # Each connection to the store looks up its own name; many at once may lose an answer of the resolver.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    name = args.rdzv_id if args.rdzv_id != "none" else "run"
    choose_stop_signals(args.signals_to_handle)
    torch_config = launch_config(args)
    workers = torch_config.nproc_per_node
    if workers > MOST_ON_A_HOST or machines * workers > MOST_WORKERS:
        raise UsageError(
            f"{machines} machines with {workers} workers each are too many: give at most "
            f"--nproc-per-node {MOST_ON_A_HOST}, and machines for {MOST_WORKERS} workers."
        )
    check_faults(config.inject, machines=machines, workers_per_machine=workers, networks=config.networks)
    if config.networks:
        _check_networks(standalone)
    if config.plan is not None:
        plan_from_json(config.plan).check_workers(machines, workers)
    opened = ev.JobOpened(
        machines=machines,
        workers_per_machine=workers,
        restarts=args.max_restarts,
        max_failures=config.max_failures,
        min_machines=least if ":" in args.nnodes and not standalone else None,
        shrinks=config.on_loss == "shrink",
        max_machine_failures=_machine_failures(config.max_machine_failures, standalone=standalone),
    )
    check_names(config.health_checks)
    check_domains(config, machines + config.spares if standalone else 1)
    if config.scheduler:
        check_scheduler(config.scheduler)
        if standalone:
            raise UsageError("--scheduler is for machines on several hosts, not for --standalone: omit it.")
    if standalone:
        store = _store_address(args) if _has_store(args) else _EMBEDDED
        secret = given_secret(config) or JobSecret.generated(config.certificates)
        settings = replace(_settings(args, config, store), secret=secret, check=check)
        return _run_cluster(MachineJob(torch_config, settings, name, opened))
    if args.rdzv_id == "none":
        raise UsageError("A run on several hosts needs a name: give all of them the same --rdzv-id.")
    settings = replace(_settings(args, config, _store_address(args)), secret=given_secret(config))
    job = MachineJob(torch_config, settings, name, opened, args.node_rank)
    return _run_one_machine(job)


def _machine_failures(given: int | None, *, standalone: bool) -> int | None:
    """The losses after which a machine is left out; None for never.

    What fails on this host fails in all of its machines.
    """
    if given is None:
        return None if standalone else _MACHINE_FAILURES
    return given or None


def _check_networks(standalone: bool) -> None:
    if not standalone:
        raise UsageError("--networks is for machines of one host (--standalone): omit it.")
    if missing := lacking():
        raise UsageError(
            f"--networks needs {missing}, which is missing here: omit it, and faults of networks."
        )


def _settings(args: argparse.Namespace, config: RunConfig, store: StoreAddress) -> AgentSettings:
    kind = "program" if args.no_python else "module" if args.module else "script"
    return AgentSettings(
        kind=kind,
        target=args.training_script,
        args=tuple(args.training_script_args),
        store=store,
        address=args.local_addr or own_address(store.host),
        shutdown_s=args.shutdown_timeout,
        config=config,
    )


def _run_cluster(job: MachineJob) -> int:
    """All machines on this host."""
    config = job.settings.config
    with contextlib.ExitStack() as stack:
        console = LauncherConsole(config)
        cluster = stack.enter_context(contextlib.closing(Cluster(job)))
        stack.callback(console.close)  # before the store's end
        console.follow(cluster.store, cluster.run_id)
        _write_endpoint(config, cluster.store, cluster.run_id)
        try:
            with _told_of_errors(console):
                result = cluster.run()
        except BaseException as error:  # the journal is out of reach, but that is a report, too
            verdict = Verdict(False, str(error) or type(error).__name__, 1)
            _write_events(config, verdict, Excerpt(), cluster.run_id, "", (), ())
            raise
    missed = missed_faults(config.inject, result.struck) if result.verdict.ok else ()
    facts = (result.verdict, result.excerpt, cluster.run_id, result.store, missed, result.passed)
    _write_events(config, *facts)
    return _exit_code(result.verdict, missed, result.passed)


def _run_one_machine(job: MachineJob) -> int:
    """One machine of several hosts; the user starts swift-run on each of them, as with torchrun."""
    config, store = job.settings.config, job.settings.store
    excerpt = Excerpt()
    stores: list[str] = []
    passed: list[str] = []
    ends: list[State] = []
    missed: tuple[Fault, ...] = ()
    end_as_usual(at_once=True)
    verdict = Verdict(False, "the launcher ended before the run did", 1)
    with contextlib.closing(LauncherConsole(config)) as console:
        console.expect(store)
        with ending_with_a_line():  # torch's clients of the store wait in C++
            job = _with_secret(replace(job, run_id=_find_run(job)))
        console.follow(store, job.run_id)
        _write_endpoint(config, store, job.run_id)
        try:
            with _told_of_errors(console):
                job = replace(job, on_store=stores.append, on_passed=passed.append, on_end=ends.append)
                verdict = run_machine(replace(job, excerpt=excerpt if config.events_out else None))
            if verdict.ok and ends:  # the journal knows of all hosts' faults
                missed = missed_faults(config.inject, ends[-1].injected)
        finally:
            url = stores[-1] if stores else ""
            _write_events(config, verdict, excerpt, job.run_id, url, missed, passed)
    return _exit_code(verdict, missed, passed)


def _write_events(
    config: RunConfig,
    verdict: Verdict,
    excerpt: Excerpt,
    run_id: str,
    store: str,
    missed: Sequence[Fault],
    passed: Collection[str],
) -> None:
    """Writes what ``--events-out`` asks for. Only who asks imports the reports.

    A disk that is full does not change how the run has ended.
    """
    if config.events_out:
        from swift_ft.cli.events_report import write_report

        try:
            write_report(config.events_out, verdict, excerpt, run_id, store, missed, passed)
        except OSError as error:
            print(f"swift-run: --events-out: the report cannot be written: {error}", file=sys.stderr)


def _with_secret(job: MachineJob) -> MachineJob:
    """The job with a secret that the launchers agree on, if the user gave none."""
    settings = job.settings
    if settings.secret is not None:
        return job
    client = connect(settings.store, job.run_id, timeout_s=settings.config.join_timeout_s)
    agreed: dict[str, str] = {}
    secret = agreed_secret(client, settings.config, agreed.__setitem__)
    return replace(job, settings=replace(settings, secret=secret), agreed=agreed)


@contextlib.contextmanager
def _told_of_errors(console: LauncherConsole) -> Iterator[None]:
    """An error that ends this launcher is an event, too: the journal does not have it."""
    try:
        yield
    except SwiftError as error:
        console.fail(str(error))
        raise


def _find_run(job: MachineJob) -> str:
    """The run to join. The store of the run before may just end: then a new one is needed.

    Of several launchers on the host of the store, one starts it.
    """
    store, name, config = job.settings.store, job.run_id, job.settings.config
    client = partial(connect, store, timeout_s=config.join_timeout_s)
    close_abandoned = closer_of_abandoned_runs(client, config, job.settings.secret)
    deadline = time.monotonic() + _STORE_ENDS_S
    while True:
        try:
            if store.backend == TCP and is_this_host(store.host) and not is_listening(store):
                StoreService(store.host, store.port, until_over=name)
            return find_run(client, name, close_abandoned)
        except RendezvousLostError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def _write_endpoint(config: RunConfig, store: StoreAddress, run_id: str) -> None:
    if config.endpoint_out:
        try:
            Path(config.endpoint_out).write_text(f"{store} {run_id}\n")
        except OSError as error:
            raise UsageError(f"--endpoint-out: the file cannot be written: {error}") from error


def _exit_code(verdict: Verdict, missed: Sequence[Fault], passed: Collection[str]) -> int:
    """The code of the process, and its last lines. A run that was not hurt as it was to be shows nothing."""
    if not verdict.ok:
        print(f"swift-run: {verdict.reason}", file=sys.stderr)
        return verdict.exit_code
    for fault in missed:
        print(f"swift-run: {missed_in_words(fault, set(passed))}", file=sys.stderr)
    return 1 if missed else 0


def _store_address(args: argparse.Namespace) -> StoreAddress:
    """The address of the store that the command line names: by a backend, or by a URL."""
    if args.rdzv_backend == ETCD and not args.rdzv_endpoint:
        raise UsageError("--rdzv-backend etcd-v3 needs --rdzv-endpoint HOST:PORT,HOST:PORT: etcd's members.")
    if "://" in args.rdzv_endpoint:
        return StoreAddress.parse(args.rdzv_endpoint).with_files(_store_files(args))
    if args.rdzv_backend == ETCD:
        return StoreAddress.etcd(args.rdzv_endpoint).with_files(_store_files(args))
    endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
    try:
        host, port = parse_rendezvous_endpoint(endpoint, default_port=29400)
    except ValueError as error:
        raise UsageError(f"{args.rdzv_endpoint!r} is not an endpoint: write host:port.") from error
    return StoreAddress.tcp(host, port)


def _store_files(args: argparse.Namespace) -> dict[str, str]:
    """The pairs of ``--rdzv-conf``, by name: they say how clients of the store show who they are."""
    pairs = (pair.partition("=") for pair in args.rdzv_conf.split(",") if pair.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _has_store(args: argparse.Namespace) -> bool:
    """Whether a standalone run is given a store, instead of starting the embedded one itself."""
    return args.rdzv_backend == ETCD or "://" in args.rdzv_endpoint


if __name__ == "__main__":
    run_and_exit()
