"""``python -m swift_ft.cli.store``: the rendezvous store, for a scheduler that keeps it running."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from torch.distributed import DistError

from swift_ft.config.exit_codes import EXIT_USAGE
from swift_ft.errors import first_line
from swift_ft.network.addresses import endpoint
from swift_ft.torch_adapters.rendezvous_store import serve_store


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m swift_ft.cli.store",
        description="Serve the rendezvous store of runs on several hosts, outside of their machines.",
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=29400, help="port to listen on (default: 29400)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code."""
    args = parser().parse_args(argv)
    try:
        store = serve_store(args.host, args.port)
    except (OSError, DistError, RuntimeError) as error:
        sys.stderr.write(f"cannot listen at {endpoint(args.host, args.port)}: {first_line(error)}\n")
        return EXIT_USAGE
    print(f"rendezvous store at {endpoint(args.host, store.port)}", flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
