"""One configuration: what the user writes on the command line is what every worker reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest

from swift_ft.cli import run
from swift_ft.config.exit_codes import EXIT_USAGE
from swift_ft.config.option import flag_of
from swift_ft.config.option_mistakes import validate
from swift_ft.config.run_config import RunConfig
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.journal_reader import Excerpt
from swift_ft.errors import NotLaunchedError, RendezvousLostError, UsageError
from swift_ft.launch.processes.context import worker_jobs
from swift_ft.launch.processes.worker import WorkerJob
from swift_ft.launch.settings import MachineJob
from swift_ft.network import JobSecret
from swift_ft.network.command_proof import proof_of_command
from swift_ft.recovery.job_state import Tries, Verdict
from swift_ft.recovery.worlds import World
from tests.support.strangers import issue, new_authority

FILES = ("plan", "token_file", "tls_cert", "tls_key", "tls_ca")
"""Options whose files are read at once."""
ELSEWHERE = ("check", "scheduler")
"""A check runs another job than it was given, and a scheduler is for several hosts: see their tests."""
FIELDS = [field.name for field in dataclasses.fields(RunConfig) if field.name not in (*FILES, *ELSEWHERE)]
TEXTS = {
    "health_checks": "disk, site.checks:fans",
    "inject": "kill machine=0 iteration=8 point=forward",
    "metrics_address": "127.0.0.7",
    "policy": "advise",
    "on_loss": "shrink",
    "policy_machines": "2:6",
    "policy_price": "2.50:400",
    "preload": "wave, xml.dom",
    "on_corruption": "drain",
    "stragglers": "replace",
    "verify": "replay",
}
TYPES = get_type_hints(RunConfig)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[MachineJob]:
    """The jobs that swift-run would have run."""
    for name in ("OMP_NUM_THREADS", "RES_OPTIONS"):  # swift-run sets what is not set
        monkeypatch.setenv(name, "1")
    found: list[MachineJob] = []

    def note(job: MachineJob) -> int:
        found.append(job)
        return 0

    monkeypatch.setattr(run, "_run_cluster", note)
    return found


def swift_run(folder: Path, *flags: str) -> int:
    return run.main(["--standalone", "--log-dir", str(folder), *flags, __file__])


def environment_of_worker(
    job: MachineJob, tries: Tries, *, joins: bool = False, world: World | None = None
) -> dict[str, str]:
    """The environment that its agent makes for a worker."""
    return worker_job(job, tries, joins=joins, world=world).env


def worker_job(
    job: MachineJob, tries: Tries, *, joins: bool = False, world: World | None = None
) -> WorkerJob:
    worker: Any = SimpleNamespace(local_rank=1, global_rank=1, world_size=4)
    found = worker_jobs(
        job.settings,
        [worker],
        lambda _, local_rank: {"LOCAL_RANK": str(local_rank)},
        run_id=job.run_id,
        machine="m",
        workers_per_machine=2,
        generation=3,
        joins=joins,
        tries=tries,
        world=world or World(),
        recorded={1: 5},
    )
    return found[1]


def context_of_worker(job: MachineJob) -> WorkerContext:
    """What a worker reads from it."""
    return WorkerContext.from_env(environment_of_worker(job, Tries()))


@pytest.mark.parametrize(
    ("tries", "count", "most"),
    [
        (Tries(restarts_left=2), "0", "2"),
        (Tries(restarts_left=0, restarts=2), "2", "2"),  # its script failed
        (Tries(restarts_left=2, restarts=3), "3", "5"),  # machines were lost
    ],
)
def test_restarts_are_counted_as_by_torchrun(
    tries: Tries, count: str, most: str, jobs: list[MachineJob], tmp_path: Path
) -> None:
    """From 0 on, in generation 3 too, and never more than there may be: what is left is left."""
    assert swift_run(tmp_path) == 0
    env = environment_of_worker(jobs[0], tries)
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == (count, most)


def test_a_worker_that_comes_alone_meets_none_of_another_start(
    jobs: list[MachineJob], tmp_path: Path
) -> None:
    """Torch's keys have the text in their names: the number is the same, and the text is no other start's."""
    assert swift_run(tmp_path) == 0
    alone, all_of_them = (
        environment_of_worker(jobs[0], Tries(restarts=1), joins=joins)["TORCHELASTIC_RESTART_COUNT"]
        for joins in (True, False)
    )
    assert int(alone) == int(all_of_them)
    assert alone != all_of_them


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_arrives_in_the_worker(name: str, jobs: list[MachineJob], tmp_path: Path) -> None:
    """A new field needs no other edit to get from the command line to the workers."""
    kind = next(iter(get_args(TYPES[name])), TYPES[name])
    path = str(tmp_path / "file")
    value = {bool: True, int: 7, float: 7.5, str: TEXTS.get(name, path)}[kind]
    assert value != getattr(RunConfig(), name), "the test must use a value that is not the default"
    assert swift_run(tmp_path, flag_of(name), *([] if kind is bool else [str(value)])) == 0
    changed: dict[str, Any] = {name: value}
    expected = dataclasses.replace(RunConfig(), **changed)
    assert context_of_worker(jobs[0]).config == expected


def test_the_token_and_certificates_arrive_and_the_token_stands_nowhere(
    jobs: list[MachineJob], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("a token of sixteen characters or more")
    token.chmod(0o600)
    files = issue(new_authority(tmp_path), "machine")
    flags = ["--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca]
    assert swift_run(tmp_path, "--token-file", str(token), *flags) == 0
    context = context_of_worker(jobs[0])
    assert context.config.token_file == str(token)
    assert context.config.certificates == files
    secret = jobs[0].settings.secret
    assert secret == JobSecret.of_token(token.read_text(), files)
    for text in (*context.to_env().values(), repr(jobs[0])):
        assert token.read_text() not in text
        assert secret.key.hex() not in text
        assert repr(secret.key) not in text


def test_certificates_belong_together(
    jobs: list[MachineJob], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swift_run(tmp_path, "--tls-cert", __file__) == EXIT_USAGE
    assert capsys.readouterr().err.splitlines() == [
        "swift-run: --tls-cert, --tls-key, --tls-ca belong together: give --tls-key and --tls-ca, too."
    ]


def test_without_a_token_each_run_of_one_host_has_its_own_secret(
    jobs: list[MachineJob], tmp_path: Path
) -> None:
    assert swift_run(tmp_path) == swift_run(tmp_path) == 0
    secrets = [job.settings.secret for job in jobs]
    assert None not in secrets
    assert secrets[0] != secrets[1]


def test_options_that_are_not_given_have_their_defaults(jobs: list[MachineJob], tmp_path: Path) -> None:
    assert swift_run(tmp_path) == 0
    context = context_of_worker(jobs[0])
    assert context.config == RunConfig()
    assert (context.rank, context.world_size, context.workers_per_machine) == (1, 4, 2)
    assert (context.machine, context.slot, context.started_in) == ("m", 0, 3)


def test_paths_do_not_depend_on_the_workers_directory(
    jobs: list[MachineJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert swift_run(tmp_path, "--profile-out", "job.json") == 0
    assert context_of_worker(jobs[0]).config.profile_out == str(tmp_path / "job.json")


@pytest.mark.parametrize(("timeout_s", "beat_s"), [(10.0, 0.5), (0.4, 0.04)])
def test_a_worker_beats_several_times_in_the_silence_that_is_allowed(
    timeout_s: float, beat_s: float, jobs: list[MachineJob], tmp_path: Path
) -> None:
    assert swift_run(tmp_path, "--heartbeat-timeout", str(timeout_s)) == 0
    assert worker_job(jobs[0], Tries()).beat_s == pytest.approx(beat_s)


def test_a_wait_within_another_ones_limit_ends_before_it() -> None:
    """The outer limit may be a user's, and the inner wait a default, or a number that nobody can change."""
    config = RunConfig(join_timeout_s=10.0, report_timeout_s=20.0, replay_timeout_s=30.0)
    assert (config.within_report_s, config.within_replay_s) == (16.0, 24.0)


@pytest.mark.parametrize("name", [name for name in FIELDS if name.endswith("_timeout_s")])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_timeouts_are_positive(name: str, value: float) -> None:
    changed: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=rf"^{flag_of(name)} must be more than 0, not {value}\.$"):
        validate(RunConfig(**changed))


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_wait_may_be_none_at_all(value: float) -> None:
    validate(RunConfig(elastic_wait_s=0.0))
    with pytest.raises(UsageError, match=rf"^--elastic-wait must be at least 0, not {value}\.$"):
        validate(RunConfig(elastic_wait_s=value))


@pytest.mark.parametrize(
    ("nodes", "machines", "least"), [("4", 4, None), ("4:4", 4, 4), ("2:4", 4, 2), ("1:3", 3, 1)]
)
def test_how_many_machines(
    nodes: str, machines: int, least: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[MachineJob] = []

    def note(job: MachineJob) -> int:
        found.append(job)
        return 0

    monkeypatch.setattr(run, "_run_one_machine", note)
    flags = [
        "--nnodes",
        nodes,
        "--rdzv-id",
        "job",
        "--rdzv-endpoint",
        "127.0.0.1:1",
        "--log-dir",
        str(tmp_path),
    ]
    assert run.main([*flags, __file__]) == 0
    assert (found[0].opened.machines, found[0].opened.min_machines) == (machines, least)


def test_each_mistake_is_one_line(
    jobs: list[MachineJob], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--helpers",
        "-1",
        "--metrics-port",
        "65536",
        "--metrics-address",
        "node7",
        "--fresh",
        "--resume",
    ]
    assert swift_run(tmp_path, *flags) == EXIT_USAGE
    assert capsys.readouterr().err.splitlines() == [
        "swift-run: --helpers must be at least 0, not -1.",
        "swift-run: --metrics-port must be at most 65535, not 65536.",
        "swift-run: --resume and --fresh exclude each other: choose one.",
        "swift-run: --metrics-address 'node7' is no address: give one of this host's, or 0.0.0.0 for all of "
        "them.",
    ]
    assert not jobs


def test_metrics_are_served_where_the_run_is_unless_told() -> None:
    assert RunConfig().metrics_listen_address("127.0.0.1") == "127.0.0.1"
    assert RunConfig().metrics_listen_address("node7") == ""  # a name stands for all addresses
    told = RunConfig(metrics_address="0.0.0.0")
    assert told.metrics_listen_address("127.0.0.1") == "0.0.0.0"


def test_a_process_without_a_launcher_has_no_context() -> None:
    with pytest.raises(NotLaunchedError, match="swift-run --standalone"):
        WorkerContext.from_env({"RANK": "0", "WORLD_SIZE": "1"})


def test_each_machine_of_a_host_has_its_failure_domain(
    jobs: list[MachineJob], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--machines", "2", "--spares", "1", "--failure-domain"]
    assert swift_run(tmp_path, *flags, "rack1,rack2, rack2") == 0
    config = jobs[0].settings.config
    assert [config.domain_of(index) for index in range(4)] == ["rack1", "rack2", "rack2", "rack1"]
    assert [RunConfig().domain_of(index) for index in range(2)] == ["", ""]
    for names in ("rack1", "rack1,rack2", "rack1,,rack2"):
        capsys.readouterr()
        assert swift_run(tmp_path, *flags, names) == EXIT_USAGE
        assert capsys.readouterr().err.splitlines() == [
            f"swift-run: --failure-domain {names!r}: give 3 names, one for each machine and spare of this "
            "host, separated by commas."
        ]


@pytest.mark.parametrize("flag", ["--events-out", "--events-log", "--endpoint-out"])
def test_a_file_of_the_launcher_needs_a_place(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ends well must not fail because its report has none."""
    assert swift_run(tmp_path, flag, str(tmp_path / "no" / "file")) == EXIT_USAGE
    assert capsys.readouterr().err == (
        f"swift-run: {flag}: there is no folder {tmp_path / 'no'}: create it.\n"
    )
    assert swift_run(tmp_path, flag, str(tmp_path)) == EXIT_USAGE
    assert capsys.readouterr().err == (
        f"swift-run: {flag} {tmp_path}: this is a folder: name a file in it.\n"
    )


def test_a_report_that_cannot_be_written_changes_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict, gone = Verdict(True, "the run is complete", 0), tmp_path / "gone" / "events.json"
    run._write_events(RunConfig(events_out=str(gone)), verdict, Excerpt(), "run", "", (), ())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-run: --events-out: the report cannot be written: ")
    assert str(gone.parent) in line


def test_a_launcher_that_fails_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads it finds no events, and why: the journal is out of reach."""

    class Lost:
        def __init__(self, job: MachineJob) -> None:
            self.store, self.run_id = job.settings.store, "run"

        def run(self) -> None:
            raise RendezvousLostError("the store is gone")

        def close(self) -> None:
            pass

    monkeypatch.setattr(run, "Cluster", Lost)
    told = tmp_path / "events.json"
    assert swift_run(tmp_path, "--quiet", "--events-out", str(told)) == 1
    report = json.loads(told.read_text())
    assert (report["ok"], report["reason"], report["events"]) == (False, "the store is gone", [])


@pytest.mark.parametrize("name", ["no_such_module", "no_such.module", "a-b", ".relative", "wave wave"])
def test_a_module_to_import_ahead_has_to_be_there(name: str) -> None:
    validate(RunConfig(preload=" wave,,xml.dom "))
    with pytest.raises(UsageError, match=f"^--preload {name}: there is no such module here"):
        validate(RunConfig(preload=f"wave,{name}"))


def test_a_program_of_another_kind_has_nothing_imported_ahead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swift_run(tmp_path, "--preload", "wave", "--no-python") == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "swift-run: --preload is of no use to a program that is started with --no-python: omit it."


@pytest.mark.parametrize(
    ("text", "limits"), [("", (1, None)), ("2:6", (2, 6)), (":6", (1, 6)), ("2:", (2, None)), ("3:3", (3, 3))]
)
def test_the_limits_of_a_policy(text: str, limits: tuple[int, int | None]) -> None:
    config = RunConfig(policy="auto", policy_machines=text)
    validate(config)
    assert config.policy_limits == limits


@pytest.mark.parametrize("text", ["6:2", "0:2", "2:0", "4", "a:b", "1:2:3", "-1:2"])
def test_limits_of_a_policy_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="such as 2:6"):
        validate(RunConfig(policy="auto", policy_machines=text))


@pytest.mark.parametrize(("text", "prices"), [("", None), ("2.50:400", (2.5, 400.0)), ("3:0.5", (3.0, 0.5))])
def test_the_price_of_a_policy(text: str, prices: tuple[float, float] | None) -> None:
    config = RunConfig(policy="auto", policy_price=text)
    validate(config)
    assert config.policy_prices == prices


@pytest.mark.parametrize(
    "text", ["2.50", "0:9", "2:0", "a:b", "1:2:3", "-1:2", ":400", "2:", "nan:1", f"1:{10**400}"]
)
def test_prices_of_a_policy_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match=r"such as 2\.50:400"):
        validate(RunConfig(policy="auto", policy_price=text))


def test_the_command_of_another_world_needs_a_proof(jobs: list[MachineJob], tmp_path: Path) -> None:
    assert swift_run(tmp_path) == 0
    command = ("other.py", "--deep")
    secret = jobs[0].settings.secret
    assert secret is not None
    proof = proof_of_command(secret, jobs[0].run_id, command)
    proved = World(1, ("m",), command, proof, plan="tp=2")
    context = WorkerContext.from_env(environment_of_worker(jobs[0], Tries(), world=proved))
    assert (context.world, context.plan) == (1, "tp=2")
    for wrong in ("", proof[:-1] + "x"):
        with pytest.raises(UsageError, match="not from a member of this job"):
            environment_of_worker(jobs[0], Tries(), world=World(1, ("m",), command, wrong))
