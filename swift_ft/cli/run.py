"""``swift-run``: torchrun's flags, and machines that may die."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import socket
import sys
import uuid
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a closed connection is our daily bread, no warning

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from swift_ft.config import EXIT_USAGE, Timeouts
from swift_ft.errors import SwiftError, UsageError
from swift_ft.launch.agent import AgentSettings
from swift_ft.launch.cluster import Cluster
from swift_ft.launch.machine import MachineJob, MachineLogs, run_machine
from swift_ft.launch.store_service import StoreService, is_listening
from swift_ft.recovery import events as ev
from swift_ft.recovery.report import recoveries
from swift_ft.testing.faults import parse_faults

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, the script's own, or 2 for what the user can fix."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # workers' lines, also into a pipe, as they come
    try:
        return _run(args)
    except UsageError as error:
        print(f"swift-run: {error}", file=sys.stderr)
        return EXIT_USAGE
    except SwiftError as error:
        print(f"swift-run: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = get_args_parser()
    parser.prog = "swift-run"
    parser.description = (
        "Start a distributed training whose machines may die. Takes torchrun's flags; scripts with a "
        "swift_ft.Session survive without going back, all others are restarted as torchrun does."
    )
    parser.set_defaults(tee="3", log_dir="swift-logs", shutdown_timeout=5)
    own = parser.add_argument_group("swift_ft")
    own.add_argument("--machines", type=int, help="with --standalone: machines to run on this host")
    own.add_argument(
        "--spares", type=int, default=0, help="with --standalone: machines that wait beside them"
    )
    own.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the store")
    own.add_argument("--fresh", action="store_true", help="delete what is in the store, and begin anew")
    own.add_argument(
        "--inject", default="", metavar="FAULTS", help="faults to inject (swift_ft.testing.faults)"
    )
    own.add_argument(
        "--heartbeat-timeout", type=float, default=10.0, metavar="S", help="silence that means death"
    )
    own.add_argument(
        "--join-timeout", type=float, default=600.0, metavar="S", help="wait for missing machines"
    )
    own.add_argument(
        "--replay-timeout", type=float, default=300.0, metavar="S", help="replay without progress"
    )
    own.add_argument(
        "--report-timeout", type=float, default=300.0, metavar="S", help="start of a replacement"
    )
    own.add_argument(
        "--group-timeout", type=float, default=300.0, metavar="S", help="forming of a process group"
    )
    own.add_argument(
        "--checkpoint-timeout", type=float, default=3600.0, metavar="S", help="last checkpoint, at the end"
    )
    own.add_argument(
        "--max-failures",
        type=int,
        default=16,
        help="lost machines since the last checkpoint before the job stops",
    )
    own.add_argument(
        "--helpers",
        type=int,
        metavar="N",
        help="survivors that compute for a lost machine in its replay, if the script says how to build its "
        "stages (default: as many as there are microbatches)",
    )
    own.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve Prometheus metrics: worker r at PORT + r (needs swift-ft[metrics])",
    )
    own.add_argument(
        "--profile-out", metavar="FILE", help="write what swift-group needs to know, after a few iterations"
    )
    own.add_argument(
        "--events-out", metavar="FILE", help="with --standalone: write all events and recoveries as JSON"
    )
    own.add_argument(
        "--endpoint-out", metavar="FILE", help="with --standalone: write the rendezvous store's address"
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.resume and args.fresh:
        raise UsageError("--resume and --fresh exclude each other: choose one.")
    parse_faults(args.inject)
    if not args.no_python and not args.module and not Path(args.training_script).is_file():
        raise UsageError(f"There is no script {args.training_script!r}: check the path.")
    _check_metrics(args.metrics_port)
    if args.helpers is not None and args.helpers < 0:
        raise UsageError(f"--helpers must be 0 or more, not {args.helpers}.")
    standalone = args.standalone or args.machines is not None or args.nnodes in ("1", "1:1")
    if args.machines is not None and args.machines < 1:
        raise UsageError(f"--machines must be at least 1, not {args.machines}.")
    machines = args.machines or parse_min_max_nnodes(args.nnodes)[0]
    if standalone and machines > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does for several workers on a host
        # Each connection to the store looks up its own name; many at once may lose an answer of the resolver.
        os.environ.setdefault("RES_OPTIONS", "timeout:1")
    run_id = args.rdzv_id if args.rdzv_id != "none" else f"run-{uuid.uuid4().hex[:8]}"
    config = _launch_config(args)
    opened = ev.Opened(machines, config.nproc_per_node, args.max_restarts, args.max_failures)
    if standalone:
        job = MachineJob(config, _settings(args, "127.0.0.1", 0), run_id, opened)
        return _run_cluster(args, job)
    return _run_one_machine(args, config, run_id, opened)


def _check_metrics(port: int | None) -> None:
    if port is None:
        return
    if not 1 <= port <= 65535:
        raise UsageError(f"--metrics-port must be between 1 and 65535, not {port}.")
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("--metrics-port needs prometheus_client: pip install 'swift-ft[metrics]'.")


def _launch_config(args: argparse.Namespace) -> LaunchConfig:
    if args.rdzv_backend not in ("static", "c10d", "swift"):
        raise UsageError(
            f"--rdzv-backend {args.rdzv_backend} is not supported: swift-run uses torch's TCPStore; "
            "leave the flag away."
        )
    torchrun_args = argparse.Namespace(**vars(args))
    torchrun_args.rdzv_backend, torchrun_args.rdzv_endpoint = "c10d", "unused:0"  # the rendezvous is our own
    config, _, _ = config_from_args(torchrun_args)
    ranks = {int(rank) for rank in args.local_ranks_filter.split(",") if rank}
    config.logs_specs = MachineLogs(
        log_dir=str(Path(args.log_dir).absolute()),
        redirects=Std.from_str(args.redirects),
        tee=Std.from_str(args.tee),
        local_ranks_filter=ranks or None,
    )
    return config


def _settings(args: argparse.Namespace, host: str, port: int) -> AgentSettings:
    kind = "program" if args.no_python else "module" if args.module else "script"
    return AgentSettings(
        kind=kind,
        target=args.training_script,
        args=tuple(args.training_script_args),
        host=host,
        port=port,
        store_mode="resume" if args.resume else "fresh" if args.fresh else "",
        inject=args.inject,
        helpers=args.helpers,
        metrics_port=args.metrics_port,
        profile_out=str(Path(args.profile_out).absolute()) if args.profile_out else "",
        timeouts=Timeouts(
            heartbeat_s=args.heartbeat_timeout,
            join_s=args.join_timeout,
            replay_s=args.replay_timeout,
            report_s=args.report_timeout,
            group_s=args.group_timeout,
            checkpoint_s=args.checkpoint_timeout,
        ),
        shutdown_s=args.shutdown_timeout,
        address=args.local_addr or ("127.0.0.1" if host in ("127.0.0.1", "localhost") else socket.getfqdn()),
    )


def _run_cluster(args: argparse.Namespace, job: MachineJob) -> int:
    cluster = Cluster(job, spares=args.spares)
    if args.endpoint_out:
        Path(args.endpoint_out).write_text(f"{cluster.endpoint} {job.run_id}\n")
    result = cluster.run()
    if args.events_out:
        report = {
            "ok": result.verdict.ok,
            "reason": result.verdict.reason,
            "recoveries": [r.to_dict() for r in recoveries(result.entries)],
            "events": [entry.to_dict() for entry in result.entries],
        }
        Path(args.events_out).write_text(json.dumps(report, indent=1))
    if result.verdict.ok:
        return 0
    print(f"swift-run: {result.verdict.reason}", file=sys.stderr)
    return result.verdict.exit_code


def _run_one_machine(args: argparse.Namespace, config: LaunchConfig, run_id: str, opened: ev.Opened) -> int:
    """One machine of several hosts, started like torchrun on each of them."""
    if not args.rdzv_endpoint:
        args.rdzv_endpoint = f"{args.master_addr}:{args.master_port or 29500}"
    if args.rdzv_id == "none":
        raise UsageError("On several hosts give all of them the same --rdzv-id.")
    host, port = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=29400)
    if _is_local(host) and not is_listening(host, port):
        StoreService(host, port, until_over=run_id)
    job = MachineJob(config, _settings(args, host, port), run_id, opened, args.node_rank)
    verdict = run_machine(job)
    if not verdict.ok:
        print(f"swift-run: {verdict.reason}", file=sys.stderr)
    return 0 if verdict.ok else verdict.exit_code


def _is_local(host: str) -> bool:
    """Whether this host is the one of the rendezvous endpoint."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
