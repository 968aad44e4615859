"""Files, and the two commands: answers for programs, one line and exit code 2 for mistakes."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from swift_ft.cli import group, simulate
from swift_ft.costs.chain_profile import ChainProfile
from swift_ft.errors import UsageError
from swift_ft.planning.advisor import LoggingQuestion, advise, bubble_ratio
from swift_ft.planning.grouping.groups import GroupPlan
from swift_ft.planning.simulation.inputs import read_calibration, read_failure_trace


def test_profile_round_trip() -> None:
    profile = ChainProfile((0.5, 0.25), (10,), (1.0, 2.0))
    assert ChainProfile.from_json(profile.to_json()) == profile
    plain = ChainProfile((0.5, 0.25), (10,))
    assert ChainProfile.from_json(plain.to_json()) == plain
    assert "failure_weight" not in plain.to_json()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"machines": [{}], "boundary_bytes": []}',
        '{"machines": [{"compute_s": NaN}], "boundary_bytes": []}',
        '{"machines": [{"compute_s": "1"}], "boundary_bytes": []}',
        '{"machines": [{"compute_s": 1}], "boundary_bytes": [1]}',
        '{"machines": [{"compute_s": 1}, {"compute_s": 1}], "boundary_bytes": ["1"]}',
    ],
)
def test_bad_profiles_end_with_one_line_and_code_two(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    argv = ["--profile", str(path), "--budget", "1GB", "--checkpoint-interval", "10", "--bandwidth", "1GB/s"]
    assert group.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("swift-group: ")
    assert err.count("\n") == 1
    assert str(path) in err


PRESET = ["--preset", "bert-128", "--checkpoint-interval", "50", "--bandwidth", "5GB/s"]


@pytest.mark.parametrize(
    "extra", [["--budget", "-1"], ["--budget", "x"], ["--method", "best"], [], ["--no-such"]]
)
def test_bad_arguments_end_with_one_line_and_code_two(
    extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert group.main([*PRESET, *extra]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_group_json_and_groups_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "groups.json"
    assert group.main([*PRESET, "--budget", "200GB", "--json", "--out", str(out)]) == 0
    answer = json.loads(capsys.readouterr().out)
    keys = {"groups", "log_bytes", "expected_recovery_s", "method", "budget_bytes", "per_machine_recovery_s"}
    assert keys <= set(answer)
    assert answer["log_bytes"] <= answer["budget_bytes"] == 200 * 10**9
    assert len(answer["per_machine_recovery_s"]) == 16
    assert json.loads(out.read_text()) == answer


def test_group_sweep_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    advice = ["--model-bytes", "13.3GB", "--iteration-time", "3.3s", "--copy-bandwidth", "10GB/s"]
    argv = [
        *PRESET,
        "--budget",
        "200GB",
        "--sweep",
        "--json",
        *advice,
        "--stages",
        "128",
        "--microbatches",
        "4",
    ]
    assert group.main(argv) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["sweep"]) == 16
    assert answer["advice"]["worth_it"] is True


def test_table_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert group.main([*PRESET, "--budget", "200GB", "--sweep"]) == 0
    assert "expected recovery" in capsys.readouterr().out


def test_an_unproven_plan_shows_its_gap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = GroupPlan(((0, 1),), 0, 20.0, (20.0, 20.0), "optimal", 0, 100, gap_s=0.005)
    monkeypatch.setattr(group, "plan_groups", lambda *_, **__: plan)
    assert group.main([*PRESET, "--budget", "200GB"]) == 0
    line = "not proven optimal: another partition could be faster by 0.025 % at most (0.005 s)"
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_sim_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--preset", "bert-128", "--trials", "5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["failure_free_h"] == pytest.approx(461.1)
    assert {"hours", "goodput"} <= set(answer["strategies"]["global_checkpoint"])
    assert answer["strategies"]["swift"] == answer["strategies"]["swift_logging_parallel"]
    assert all(fact["source"] for fact in answer["facts"])


def test_sim_never_finishing_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "--machines",
        "1000",
        "--mtbf-per-machine",
        "1000h",
        "--training-time",
        "100h",
        "--trials",
        "2",
        "--json",
    ]
    assert simulate.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["strategies"]["no_fault_tolerance"]["hours"] is None


@pytest.mark.parametrize(
    "argv", [[], ["--machines", "5"], ["--preset", "gpt"], ["--preset", "vit-128", "--trials", "0"]]
)
def test_sim_mistakes(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_sim_trace_and_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, results = tmp_path / "trace.csv", tmp_path / "results.json"
    trace.write_text("time,machine\n7200,3\n3600,1\n")
    record = {"strategy": "swift_logging", "startup_s": 2, "restore_s": 1, "replay_s": 5}
    results.write_text(
        json.dumps({"recoveries": [{**record, "replayed_iterations": 20, "iteration_s": 0.5}]})
    )
    argv = [
        "--preset",
        "bert-128",
        "--trace",
        str(trace),
        "--calibrate",
        str(results),
        "--trials",
        "1",
        "--json",
    ]
    assert simulate.main(argv) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["strategies"]["swift_logging"]["failures"] == 2
    facts = {fact["name"]: fact for fact in answer["facts"]}
    assert (facts["start-up"]["value"], facts["start-up"]["source"]) == (2, f"measured: {results}")
    assert not {"detection", "replacement machine", "join"} & set(facts)
    assert read_failure_trace(trace) == ((3600.0, 1), (7200.0, 3))
    assert read_calibration(results)[0].replay_s == 5


@pytest.mark.parametrize("line", ["x,1", "5", "-1,0", "nan,0", "1,-2"])
def test_bad_trace_names_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"time,machine\n1,1\n{line}\n")
    with pytest.raises(UsageError, match="line 3"):
        read_failure_trace(path)


@pytest.mark.parametrize("tool", [group, simulate])
def test_plots(tool: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    argv = [*PRESET, "--plot"] if tool is group else ["--preset", "bert-128", "--trials", "1", "--plot"]
    assert tool.main([*argv, str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_bubble_of_figure_1() -> None:
    """§2.1: four stages and four microbatches idle 3/7 of the time."""
    assert bubble_ratio(4, 4) == pytest.approx(3 / 7)


QUESTION: dict[str, Any] = {
    "log_bytes_per_iteration": 1e9,
    "busiest_sender_bytes": 1e8,
    "model_bytes": 1e9,
    "checkpoint_interval": 100,
    "iteration_s": 1.0,
    "copy_bandwidth": 1e10,
    "bubble": 0.2,
    "replay_s": 0.3,
}


@pytest.mark.parametrize(
    ("change", "worth_it"),
    [({}, True), ({"model_bytes": 1e7}, False), ({"bubble": 0.005}, False), ({"replay_s": 1.0}, False)],
)
def test_advice_of_section_5_4(change: dict[str, float], worth_it: bool) -> None:
    assert advise(LoggingQuestion(**(QUESTION | change))).worth_it is worth_it
