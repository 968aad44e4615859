"""The example training with other arguments of the session (SESSION, as JSON); it writes its metrics.

It writes a line before each step and after the last one. If the metrics are served, it finally writes what
Prometheus gets.
"""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import train_swift

import swift_ft
from swift_ft.config.worker_context import WorkerContext

RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
settings = json.loads(os.environ["SESSION"])
if "disk_bytes" in settings:
    settings["log_budget_bytes"] = swift_ft.LogBudget(disk_bytes=settings.pop("disk_bytes"))


class Session(swift_ft.Session):
    def __init__(self, state: Any, **arguments: Any) -> None:
        super().__init__(state, **{**arguments, **settings})

    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        with (FOLDER / f"metrics{RANK}.jsonl").open("a") as file:
            for step in super().steps(iterations):
                file.write(json.dumps(self.metrics().to_dict()) + "\n")
                yield step
            file.write(json.dumps(self.metrics().to_dict()) + "\n")
        if port := WorkerContext.from_env().config.worker_metrics_port:
            url = f"http://127.0.0.1:{port + RANK}/metrics"
            (FOLDER / f"scrape{RANK}.txt").write_bytes(urllib.request.urlopen(url, timeout=60).read())


swift_ft.Session = Session  # type: ignore[misc]
train_swift.main()
