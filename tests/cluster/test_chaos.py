"""The campaign of random faults: it sees what is identical, what is wrong, and what ended with a reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.chaos.main import main
from swift_ft.errors import SwiftError
from swift_ft.faults import fail_at, parse_faults
from swift_ft.host.networks import lacking
from swift_ft.testing.chaos.campaign import Campaign
from swift_ft.testing.chaos.habits import Habit, random_habits
from swift_ft.testing.chaos.plain_trial import plain_state
from swift_ft.testing.chaos.plans import Shape
from swift_ft.testing.chaos.run_folder import report_of
from swift_ft.testing.chaos.running import run_trial
from swift_ft.testing.chaos.trial import Outcome, Training, Trial
from tests.support.cluster import EXAMPLES, SMALL
from tests.support.missing import skip_for_missing
from tests.support.nobody import NOBODY, as_nobody
from tests.support.waiting import wait_until

SCRIPT = str(Path(__file__).parent / "scripts" / "small_replicas.py")
PLACES = ("--iterations", "4", "--checkpoint-every", "2", "--store", "{folder}/store")
TINY = ("--layers=2", "--width=16", "--heads=2", "--sequence=16", "--microbatch-size=1", "--microbatches=2")
SEED = 35
"""Of a plan with one habit, and a fault that strikes in a step."""
NAMESPACES = Path("/run/netns")
LAUNCH = ("--standalone", "--machines", "2", "--heartbeat-timeout", "8", "--spares", "1")


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.thorough
def test_outcomes(tmp_path: Path) -> None:
    script = (str(EXAMPLES / "train_ddp.py"), *SMALL, *PLACES)
    training = Training(LAUNCH, script, "{folder}/store", deadline_s=120)
    undisturbed = run_trial(training, new(tmp_path / "undisturbed"))
    assert undisturbed.outcome == Outcome.IDENTICAL
    assert any("models.model" in name for name in undisturbed.state)
    kill = [fail_at(iteration=1, machine=1, point="optimizer")]
    recovered = run_trial(training, new(tmp_path / "recovered"), kill, undisturbed)
    assert recovered.outcome == Outcome.IDENTICAL
    assert "MachineLost" in report_of(recovered.folder).read_text()
    name = next(name for name in undisturbed.state if "models.model" in name)
    unlike = replace(undisturbed, state={**undisturbed.state, name: "another value"})
    other = run_trial(training, new(tmp_path / "other"), (), unlike)
    assert other.outcome == Outcome.WRONG


def test_a_failure_is_told_from_a_crash(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit('no data')")
    ended = run_trial(Training(LAUNCH, (str(script),), "", 120), new(tmp_path / "ended"))
    assert ended.outcome == Outcome.CRASHED
    assert "no fault of the plan can have caused this" in ended.reason
    assert "no data" in ended.reason
    script.write_text("import time; time.sleep(1000)")
    hung = run_trial(Training(LAUNCH, (str(script),), "{folder}/store", 5), new(tmp_path / "hung"))
    assert hung.outcome == Outcome.HUNG


def test_a_torchrun_that_hangs_leaves_no_worker(tmp_path: Path) -> None:
    script, told = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(1000)")
    with pytest.raises(SwiftError, match=r"Plain torchrun did not end within 30 s"):
        plain_state(Training(LAUNCH, (str(script),), "", 30), new(tmp_path / "run"), 1, 0)
    worker = Path("/proc", told.read_text())
    wait_until(lambda: not worker.exists(), "the end of the worker")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGHUP, 129),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.thorough),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.thorough),
        pytest.param(signal.SIGQUIT, 131, marks=pytest.mark.thorough),
    ],
)
def test_a_signal_ends_the_run_in_progress(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Workers, launcher and temporary folders are gone with it."""
    temporary, told, script = new(tmp_path / "temporary"), new(tmp_path / "told"), tmp_path / "script.py"
    script.write_text(
        f"import os, pathlib, time\npathlib.Path({str(told)!r}, str(os.getpid())).touch()\ntime.sleep(600)"
    )
    tool = subprocess.Popen(
        # Under nohup it would ignore one of these signals.
        ["env", "--default-signal", sys.executable, "-m", "swift_ft.cli.chaos", "--", str(script)],
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    wait_until(lambda: len([*told.iterdir()]) == 2, "the beginning of both workers")
    tool.send_signal(number)
    assert tool.wait(60) == code
    assert [*temporary.iterdir()] == []
    assert not any(Path("/proc", worker.name).exists() for worker in told.iterdir())


def test_habits_are_planted_into_both_runs(tmp_path: Path) -> None:
    script = (str(EXAMPLES / "train_ddp.py"), *TINY, *PLACES)
    training = Training(LAUNCH, script, "{folder}/store", deadline_s=120)
    plain = run_trial(training, new(tmp_path / "plain"))
    shape = Shape(machines=2, workers=1, iterations=4, most=1)
    assert random_habits(SEED) == (Habit.RATE,)
    (trial,) = Campaign(training, shape, tmp_path, SEED, plans=1, habits=True).run()
    assert (trial.outcome, trial.habits) == (Outcome.IDENTICAL, (Habit.RATE,)), trial.reason
    assert plain.state.keys() == trial.state.keys()
    assert plain.state != trial.state


@pytest.mark.parametrize("habits", [False, True])
def test_a_module_that_imports_the_session_by_its_home(
    habits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is found from where the tool runs, though each run is elsewhere; habits are planted all the same."""
    text = Path(SCRIPT).read_text().replace("import swift_ft\n", "from swift_ft.session import Session\n")
    package = new(tmp_path / "package")
    (package / "__init__.py").touch()
    (package / "train.py").write_text(text.replace("swift_ft.Session(", "Session("))
    monkeypatch.chdir(tmp_path)
    option = ("--habits", "--seed", str(SEED)) if habits else ("--torchrun",)
    plan = "kill machine=1 iteration=2 point=optimizer"
    code = main([*option, "--plan", plan, "--spares", "1", "--json", "--", "-m", "package.train"])
    facts = json.loads(capfd.readouterr().out)
    assert "error" not in facts, facts["error"]
    (run,) = facts["runs"]
    assert (code, run["outcome"], run["ways"], run["never_struck"]) == (0, "identical", ["replica"], []), run
    assert run["habits"] == (["rate"] if habits else [])
    assert habits or facts["torchrun"]["differ"] == []
    assert facts["outside"] == []


def report(capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code of ``swift-chaos --json``, and what it prints."""
    code = main([*options, "--json", "--", SCRIPT])
    facts: dict[str, Any] = json.loads(capfd.readouterr().out)
    return code, facts


def test_a_healthy_script_passes(capfd: pytest.CaptureFixture[str]) -> None:
    """The faults struck: its file, which is in its working directory, and its state are compared."""
    plan = "kill machine=1 iteration=2 point=optimizer; freeze worker=0 iteration=3 point=reduce seconds=0.5"
    plan += "; full machine=all iteration=3 point=optimizer calls=2"
    code, facts = report(capfd, "--plan", plan, "--spares", "1", "--torchrun")
    (run,) = facts["runs"]
    assert facts["torchrun"]["compared"] > 20
    assert facts["torchrun"]["differ"] == []
    assert (code, facts["ok"], run["outcome"]) == (0, True, "identical"), run
    assert (run["ways"], run["never_struck"], run["iterations_lost"]) == (["replica"], [], 0)
    assert run["recovery_s"] > 0


def test_a_planted_bug_is_found_named_and_shrunk(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has lost nobody is as the undisturbed one: only the kill brings the bug out."""
    monkeypatch.setenv("PLANTED", "1")
    plan = "break worker=0 iteration=1 point=reduce; kill machine=1 iteration=1 point=optimizer"
    code, facts = report(capfd, "--plan", plan, "--shrink-runs", "1", "--spares", "1")
    (run,) = facts["runs"]
    assert (code, facts["ok"], run["outcome"]) == (1, False, "WRONG"), run
    assert "file weights.txt, worker 0.models.model.bias" in run["reason"]
    assert run["smallest"] == "kill machine=1 iteration=1 point=optimizer"
    assert run["repeat"].startswith(f"swift-chaos --plan '{plan}' ")
    assert run["repeat_smallest"].startswith(f"swift-chaos --plan '{run['smallest']}' ")
    assert run["repeat_smallest"].endswith(f" -- {SCRIPT}")


@pytest.mark.parametrize("every", [4, pytest.param(100, marks=pytest.mark.thorough)])
def test_a_bug_after_the_last_checkpoint_is_found(
    every: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script saves no checkpoint after its fifth iteration, or none at all, and writes no file."""
    text = Path(SCRIPT).read_text().replace("checkpoint_every=2", f"checkpoint_every={every}")
    text = text.replace('"PLANTED" in', '"SWIFT_CONTEXT" in')  # not under plain torchrun
    text = text.replace("2.0 if came_back()", "2.0 if came_back() and step.index == 4")
    script = tmp_path / "ends_between.py"
    script.write_text(text[: text.index("if dist.get_rank() == 0:")])
    plan = "kill machine=1 iteration=1 point=optimizer"
    options = ("--plan", plan, "--spares", "1", "--torchrun", "--no-shrink", "--json")
    code = main([*options, "--", str(script), "--iterations", "5", "--store", "{folder}/store"])
    facts = json.loads(capfd.readouterr().out)
    (run,) = facts["runs"]
    assert (code, run["outcome"], run["never_struck"]) == (1, "WRONG", []), run
    assert "worker 0.models.model.weight" in run["reason"]
    assert facts["torchrun"]["differ"] == []


def test_times_are_no_findings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the name of a file, in a variable of the loop; and a file that all runs share is named."""
    script = tmp_path / "times.py"
    text = Path(SCRIPT).read_text().replace("import argparse", "import argparse\nimport time")
    text = text.replace("    with step:\n", "    began = time.time()\n    with step:\n")
    name = "Path(args.store).with_name(f'log-{time.time_ns()}-{os.getpid()}.txt')"
    script.write_text(f"{text}\n{name}.touch()\nPath(__file__).with_name('beside.txt').write_text('1')\n")
    plan = "kill machine=1 iteration=2 point=optimizer"
    assert main(["--plan", plan, "--spares", "1", "--json", "--", str(script)]) == 0
    facts = json.loads(capfd.readouterr().out)
    (run,) = facts["runs"]
    assert (run["outcome"], run["ways"]) == ("identical", ["replica"]), run
    assert facts["not_compared"] == ["file log-*-*.txt", "worker 0.plain.bytes.carried..began"]
    assert facts["outside"] == [str(tmp_path / "beside.txt")]


@pytest.mark.parametrize(
    ("plan", "ways"),
    [
        ("kill machine=1 iteration=any point=start", ["restart"]),
        ("kill machine=1 iteration=any point=end", ["replica"]),
        pytest.param("stop worker=0 iteration=any point=end", ["replica"], marks=pytest.mark.thorough),
        pytest.param(
            "kill machine=1 iteration=3; kill machine=0 iteration=any point=join",
            ["replica"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_loss_at_either_end_of_a_job(plan: str, ways: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """And a second one in the recovery of the first, not as all start."""
    code, facts = report(capfd, "--plan", plan, "--spares", "2")
    (run,) = facts["runs"]
    assert (code, run["outcome"], run["never_struck"]) == (0, "identical", []), run
    # Where the second one is lost before it has given its state, nobody has one: all start from the store.
    assert run["ways"] in (ways, [*ways, "start"] if "point=join" in plan else ways)


@pytest.mark.thorough
def test_replicas_that_differ_after_a_loss_are_a_finding(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with a line and a checkpoint, as if by the fault. The journal tells them apart."""
    monkeypatch.setenv("PLANTED", "1")
    script, drift = (
        tmp_path / "drifts.py",
        "torch.nn.init.ones_(model.module.weight) if came_back() else None",
    )
    text = Path(SCRIPT).read_text().replace("2.0 if came_back()", "1.0 if came_back()")
    script.write_text(
        text.replace("        scheduler.step()\n", f"        scheduler.step()\n        {drift}\n")
    )
    plan = "kill machine=1 iteration=3 point=optimizer"
    code = main(["--plan", plan, "--spares", "1", "--no-shrink", "--json", "--", str(script)])
    (run,) = json.loads(capfd.readouterr().out)["runs"]
    assert (code, run["outcome"]) == (1, "CRASHED"), run
    assert "no fault of the plan can have caused this: replicas differ after iteration" in run["reason"]


@pytest.mark.thorough
def test_a_seed_is_repeated_by_its_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "1")
    options = ("--faults", "kill", "--no-shrink", "--seed")
    code, facts = report(capfd, *options, "4", "--plans=2")
    assert code == 1
    first, second = facts["runs"]
    (again,) = report(capfd, *options, "5", "--plans", "1")[1]["runs"]
    assert (again["plan"], again["outcome"]) == (second["plan"], second["outcome"])
    repeat = f"swift-chaos --plan '{first['plan']}' --spares 3 --json --no-shrink -- {SCRIPT}"
    assert first["repeat"] == repeat


@pytest.mark.thorough
@pytest.mark.parametrize(
    "plan",
    [
        "freeze worker=1 iteration=2 point=optimizer seconds=8",
        "suspend machine=1 iteration=2 point=optimizer seconds=0.5",
        "suspend machine=1 iteration=2 point=optimizer seconds=3",
        "slow worker=1 iteration=1 point=optimizer factor=5",
        "clock worker=0 iteration=1 point=optimizer seconds=-86400",
        "clock worker=1 iteration=1 point=optimizer seconds=86400",
        "flip worker=0 iteration=3 point=optimizer; kill machine=1 iteration=4 point=optimizer",
        "truncate worker=0 iteration=3 point=optimizer; kill machine=1 iteration=4 point=optimizer",
        "vanish worker=0 iteration=2 point=optimizer seconds=3",
    ],
)
def test_each_kind_of_fault_strikes_and_is_survived(plan: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, facts = report(capfd, "--plan", plan)
    (run,) = facts["runs"]
    assert (code, run["never_struck"]) == (0, []), run
    assert run["plan"] == "; ".join(map(str, parse_faults(plan)))


@pytest.mark.parametrize(
    ("plan", "spares"),
    [
        ("reload machine=0 iteration=2; kill machine=1 iteration=any point=take", "1"),
        pytest.param("move machine=1 iteration=2 point=optimizer", "1", marks=pytest.mark.thorough),
        pytest.param("move machine=1 iteration=2 point=reduce", "0", marks=pytest.mark.thorough),
        pytest.param(
            "kill machine=1 iteration=1; reload machine=0 iteration=3; "
            "kill worker=0 iteration=any point=offer",
            "1",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_change_comes_among_faults(plan: str, spares: str, tmp_path: Path) -> None:
    # Another world takes over some iterations after its workers are prepared.
    script = (SCRIPT, "--iterations", "14", "--store", "{folder}/store")
    training = Training((*LAUNCH[:-1], spares), script, "{folder}/store", 120)
    plain = run_trial(training, new(tmp_path / "plain"))
    trial = run_trial(training, new(tmp_path / "faults"), parse_faults(plan), plain)
    assert (trial.outcome, trial.missed) == (Outcome.IDENTICAL, ()), (trial.reason, trial.missed)
    events = json.loads(report_of(tmp_path / "faults").read_text())["events"]
    assert "SwitchRequested" in {event["event"] for event in events}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return run_trial(Training(LAUNCH, (SCRIPT,), "", 120), tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "action",
    ["unwritable", "unreadable", "missing", "lag", "busy", "denied", "torn", "full", "read-only"],
)
def test_each_error_of_a_store_is_met_and_survived(action: str, tmp_path: Path, undisturbed: Trial) -> None:
    """First of all workers, as one is lost and its replacement looks for a checkpoint; then of one."""
    plan = parse_faults(
        f"kill machine=1 iteration=3 point=optimizer; {action} machine=all iteration=any point=report "
        f"seconds=2; {action} worker=0 iteration=4 point=optimizer calls=2"
    )
    trial = run_trial(Training(LAUNCH, (SCRIPT,), "", 120), new(tmp_path / "run"), plan, undisturbed)
    # Where the earlier one lasts until the later one is over, the later one meets none.
    assert trial.outcome == Outcome.IDENTICAL, trial.reason
    assert trial.missed in ((), (str(plan[2]),))
    assert f"the first call that '{plan[1]}' meets" in trial.output.read_text()


CUTS = [
    "unplug machine=1 iteration=2 point=optimizer seconds=2",
    "unplug machine=0 iteration=2 point=optimizer seconds=12",
    "unplug machine=1 iteration=2 point=optimizer peer=0 seconds=8",
    "mute machine=1 iteration=2 point=optimizer seconds=12",
    "deaf machine=0 iteration=2 point=optimizer seconds=12",
    "flap machine=1 iteration=1 point=optimizer seconds=8",
    "throttle machine=1 iteration=1 point=optimizer mbit=5 seconds=3",
]


@pytest.mark.parametrize(
    "plan", [CUTS[1], *(pytest.param(p, marks=pytest.mark.thorough) for p in CUTS if p != CUTS[1])]
)
def test_a_network_is_cut_and_mended(plan: str, capfd: pytest.CaptureFixture[str]) -> None:
    if missing := lacking():
        skip_for_missing(f"networks of machines ({missing})")
    code, facts = report(capfd, "--networks", "--plan", plan, "--spares", "1")
    (run,) = facts["runs"]
    assert (code, run["outcome"], run["never_struck"]) == (0, "identical", []), run
    assert run["ways"] or "throttle" in plan
    owners = {path.name.split("-")[1] for path in NAMESPACES.glob("swift-*-*-*")}
    assert all(Path(f"/proc/{owner}").exists() for owner in owners), owners  # of other runs


def test_networks_without_root(tmp_path: Path) -> None:
    """Whoever may be root in a namespace of their own needs no other right."""
    if missing := lacking():
        skip_for_missing(f"networks of machines ({missing})")
    if os.geteuid() != 0:
        skip_for_missing("root, which this user is not: the other tests of networks run without it")
    with tempfile.TemporaryDirectory() as name:  # all may go into it, as nobody else's tests may
        folder = Path(name)
        folder.chmod(0o777)
        command = [
            sys.executable,
            "-m",
            "swift_ft.cli.run",
            "--standalone",
            "--machines",
            "2",
            "--spares",
            "1",
        ]
        command += ["--networks", "--inject", CUTS[0], "--events-out", "events.json", SCRIPT]
        done = subprocess.run(
            as_nobody(command), cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((folder / "events.json").read_text())
        owners = {path.stat().st_uid for path in folder.rglob("*")}
    assert owners == {NOBODY}
    (recovery,) = report["recoveries"]
    assert recovery["mode"] == "replica"


@pytest.mark.thorough
def test_another_result_under_torchrun_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "other.py"
    script.write_text(Path(SCRIPT).read_text().replace("lr=0.1", "lr=0.1 + ('SWIFT_CONTEXT' in os.environ)"))
    assert main(["--torchrun", "--json", "--plan", "kill machine=1 iteration=2", "--", str(script)]) == 1
    facts = json.loads(capfd.readouterr().out)
    assert "worker 0.models.model.weight" in facts["torchrun"]["differ"]
    assert "file weights.txt" in facts["torchrun"]["differ"]
    assert facts["runs"][0]["outcome"] == "identical"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("subprocess.Popen(['sleep', '60'], start_new_session=True)", "process"),
        ("os.mkfifo(os.environ['TMPDIR'] + f'/swift-{os.getpid()}')", "temporary file swift-"),
    ],
)
def test_what_is_left_behind_is_found(line: str, left: str, tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(f"import os, subprocess\nfrom pathlib import Path\n{line}\n{Path(SCRIPT).read_text()}")
    trial = run_trial(Training(LAUNCH, (str(script),), "", 120), new(tmp_path / "run"))
    assert trial.outcome == Outcome.LEAKED
    assert left in trial.reason


@pytest.mark.thorough
def test_what_a_script_leaves_itself_is_no_leak(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither undisturbed nor killed: a folder of temporary files, and shared memory."""
    script, kind = tmp_path / "leaves.py", f"{tmp_path.name.replace('_', '').rstrip('0123456789')}_"
    lines = f"tempfile.mkdtemp(prefix='shards-')\nPath(f'/dev/shm/{kind}{{os.getpid()}}').touch()"
    script.write_text(f"import os, tempfile\nfrom pathlib import Path\n{lines}\n{Path(SCRIPT).read_text()}")
    code = main(["--plan", "kill machine=1 iteration=3", "--json", "--", str(script)])
    left = [*Path("/dev/shm").glob(f"{kind}*")]
    for path in left:
        path.unlink()
    (run,) = json.loads(capfd.readouterr().out)["runs"]
    assert (code, run["outcome"]) == (0, "identical"), run
    assert len(left) >= 5  # of two workers, twice, and of the one that took the lost one's place


def test_a_mistake_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--", "nothing.py"], "There is no script 'nothing.py'"),
        (["--", "-m"], "name the module after -m"),
        (["--faults", "fire", "--", SCRIPT], "there is no fault 'fire'"),
        (["--plan", "kill machine=7 iteration=1", "--", SCRIPT], "there is no machine 7"),
        (["--plan", "unplug machine=1 iteration=1", "--", SCRIPT], "add --networks"),
        (["--faults", "network", "--", SCRIPT], "networks of their own"),
        (["--torchrun", "--habits", "--", SCRIPT], "compares the script as it is"),
        ([], "name the script after --"),
    ):
        assert main(options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("swift-chaos: ")
        assert words in line
