"""swift-sim against a training that was really executed and lost three machines to SIGKILL.

``data/executed.json`` is what ``benchmarks/planning/simulated.py --breakdown`` measured: 70 iterations on
four machines, on two busy cores.
The simulator gets its recoveries and the times of its failures, and must find its total.
"""

import json
from pathlib import Path

import pytest

from swift_ft.cli import simulate

RECORD = Path(__file__).parent / "data" / "executed.json"


def simulated_s(tmp_path: Path, capsys: pytest.CaptureFixture[str], *further: str) -> float:
    executed = json.loads(RECORD.read_text())
    trace = tmp_path / "trace.csv"
    trace.write_text("".join(f"{at},{machine}\n" for at, machine in executed["failures"]))
    work_s = executed["iterations"] * executed["iteration_s"]
    interval_s = executed["checkpoint_every"] * executed["iteration_s"]
    command = [
        "--machines",
        str(executed["machines"]),
        "--training-time",
        f"{work_s}s",
        "--trace",
        str(trace),
    ]
    command += [
        "--checkpoint-interval",
        f"{interval_s}s",
        "--checkpoint-stall",
        "0s",
        "--trials",
        "1",
        "--json",
    ]
    assert simulate.main([*command, *further]) == 0
    outcome = json.loads(capsys.readouterr().out)["strategies"]["swift_logging"]
    assert outcome["failures"] == len(executed["failures"])
    return float(outcome["hours"]) * 3600


def test_calibrated_simulation_finds_the_time_of_an_executed_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 10 %, and the assumptions that calibration replaces are far from it."""
    executed_s = json.loads(RECORD.read_text())["training_s"]
    calibrated_s = simulated_s(tmp_path, capsys, "--calibrate", str(RECORD))
    assert calibrated_s == pytest.approx(executed_s, rel=0.1)
    assert simulated_s(tmp_path, capsys) > 1.5 * executed_s


def test_failures_cost_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulation finds the time that failures add, not only the total."""
    executed = json.loads(RECORD.read_text())
    calm_s = executed["iterations"] * executed["iteration_s"]
    recoveries = executed["recoveries"]
    lost_s = sum(r["startup_s"] + r["restore_s"] + r["replay_s"] for r in recoveries)
    found_s = simulated_s(tmp_path, capsys, "--calibrate", str(RECORD)) - calm_s
    assert found_s == pytest.approx(lost_s, rel=0.25)
