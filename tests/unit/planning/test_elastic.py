"""Jobs whose number of nodes changes: Oobleck's Table 2, what each way costs, traces, and mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.elastic import NO_PREDICTION, TABLES, WITHIN, infer
from swift_ft.cli import simulate
from swift_ft.errors import UsageError
from swift_ft.planning.elastic_jobs import ELASTIC_PRESETS, losing_every, read_elastic_job, read_spot_trace
from swift_ft.planning.simulation.elastic import WAYS, Change, ElasticJob, simulate_elastic

TABLE_2 = [
    ("oobleck-bert-large", 6 * 3600, 287.10, 0.012),
    ("oobleck-bert-large", 3600, 286.28, 0.012),
    ("oobleck-bert-large", 600, 282.11, 0.036),
    ("oobleck-gpt3-2.7b", 6 * 3600, 7.29, 0.012),
    ("oobleck-gpt3-2.7b", 3600, 7.23, 0.012),
    ("oobleck-gpt3-2.7b", 600, 6.89, 0.036),
]
"""Oobleck's Table 2: samples per second while 30 nodes become 15, one lost after each interval."""


@pytest.mark.parametrize(("name", "interval_s", "published", "within"), TABLE_2)
def test_table_2_of_oobleck(name: str, interval_s: float, published: float, within: float) -> None:
    job = ELASTIC_PRESETS[name]
    outcome = simulate_elastic(job, losing_every(interval_s, 30, 15), 15 * interval_s, "elastic")
    assert outcome.throughput == pytest.approx(published, rel=within)


@pytest.mark.parametrize(
    ("system", "model"),
    [(system, model) for system in TABLES for model in TABLES[system] if (system, model) != NO_PREDICTION],
)
def test_two_cells_of_tables_2_and_4_predict_the_third(system: str, model: str) -> None:
    row = infer(system, model)
    assert row.predicted == pytest.approx(row.published[1], rel=WITHIN[system])
    assert 0 < row.loss_s < 600


def test_a_restart_that_takes_longer_than_the_next_loss_cannot_be_seen() -> None:
    row = infer(*NO_PREDICTION)
    assert row.loss_s > 600
    assert abs(row.error) > 0.3


def test_cells_that_an_inferred_job_yields_are_those_it_was_inferred_from() -> None:
    row = infer("Varuna", "BERT-Large")
    job = ElasticJob({15: row.throughput}, nodes=30, change_s=row.loss_s)
    for interval_s, cell in ((6 * 3600, row.published[0]), (600, row.published[2])):
        outcome = simulate_elastic(job, losing_every(interval_s, 30, 15), 15 * interval_s, "elastic")
        assert outcome.throughput == pytest.approx(cell)


JOB = ElasticJob(
    {2: 20.0, 4: 40.0},
    nodes=4,
    batch=10,
    change_s=5,
    grow_s=3,
    adopt_s=1,
    restart_s=50,
    checkpoint_interval_s=20,
)


def samples(changes: list[Change], way: str, job: ElasticJob = JOB, duration_s: float = 200.0) -> float:
    """What a way yields in 200 seconds."""
    return simulate_elastic(job, changes, duration_s, way).samples


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("elastic", 4000 - 5 + 95 * 20),  # half a step, 5 s; three nodes do what two can
        ("adoption", 4000 - 5 + 99 * 20),  # one node does two nodes' work, and all wait for it
        ("waiting", 4000 - 5),
        ("restart", 4000 - 400 + 50 * 20),  # half a checkpoint interval, 50 s
    ],
)
def test_what_a_loss_costs(way: str, expected: float) -> None:
    assert samples([Change(100, -1)], way) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("elastic", 4000 - 5 + 15 * 20 + 77 * 40),
        ("adoption", 4000 - 5 + 19 * 20 + 77 * 40),
        ("waiting", 4000 - 5 + 77 * 40),
        ("restart", 4000 - 400 + 30 * 40),
    ],
)
def test_what_growing_again_costs(way: str, expected: float) -> None:
    """The node comes back after 20 s: during a restart it begins anew, otherwise nothing is lost."""
    assert samples([Change(100, -1), Change(120, +1)], way) == pytest.approx(expected)


def test_a_loss_during_a_change_begins_it_anew_and_loses_no_second_step() -> None:
    assert samples([Change(100, -1), Change(103, -1)], "elastic") == pytest.approx(4000 - 5 + 92 * 20)


def test_below_the_least_number_of_nodes_training_stops_until_it_can_start_again() -> None:
    outcome = simulate_elastic(JOB, [Change(100, -3), Change(120, +1)], 200, "elastic")
    assert outcome.samples == pytest.approx(4000 - 5 + 30 * 20)
    assert outcome.down_s == pytest.approx(20 + 50)


def test_nodes_that_come_and_go_are_not_taken_in() -> None:
    """Each of five short visits costs two changes at once, and nothing if nodes must stay for 30 s first."""
    job = ElasticJob({4: 40.0, 5: 44.0}, nodes=4, batch=10, change_s=5, grow_s=3)
    flapping = [Change(20 + 20 * i + 10 * out, -1 if out else 1) for i in range(5) for out in (0, 1)]
    patient = ElasticJob(**{**vars(job), "hold_s": 30.0})
    assert samples(flapping, "elastic", patient) == pytest.approx(200 * 40)
    assert samples(flapping, "elastic", job) < samples(flapping, "elastic", patient)
    stays = [*flapping, Change(120, +1)]
    assert samples(stays, "elastic", patient) == pytest.approx(150 * 40 + 47 * 44)


@given(st.lists(st.tuples(st.floats(0, 300), st.integers(-2, 2)), max_size=12), st.sampled_from(sorted(WAYS)))
def test_no_way_yields_more_than_the_nodes_could(moves: list[tuple[float, int]], way: str) -> None:
    changes, nodes = [], JOB.nodes
    for time_s, delta in sorted(moves):
        changes.append(Change(time_s, max(delta, -nodes)))
        nodes += changes[-1].nodes
    outcome = simulate_elastic(JOB, changes, 200, way)
    assert outcome.samples >= 0
    assert outcome.of_available <= 1 + 1e-9
    assert 0 <= outcome.down_s <= 200 + 1e-6


# ------------------------------------------------------------------------------------ files and commands


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("time,nodes\n# a comment\n7200,+2\n3600,-1\n")
    assert read_spot_trace(path) == (Change(3600, -1), Change(7200, 2))


@pytest.mark.parametrize(("line", "words"), [("x,1", "line 1"), ("5", "line 1"), ("-5,1", "zero or more")])
def test_lines_that_are_no_change(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "spot.csv").write_text(line + "\n")
    with pytest.raises(UsageError, match=words):
        read_spot_trace(tmp_path / "spot.csv")


def test_a_job_by_its_templates(tmp_path: Path) -> None:
    layer = {"forward_s": 0.01, "backward_s": 0.02, "state_bytes": 1}
    (tmp_path / "layers.json").write_text(json.dumps({"layers": [layer] * 6}))
    facts = {"layers": "layers.json", "nodes": 6, "min_nodes": 2, "microbatches": 24, "batch": 48}
    (tmp_path / "job.json").write_text(json.dumps(facts))
    job = read_elastic_job(tmp_path / "job.json")
    assert sorted(job.throughput) == [2, 3, 4, 5, 6]
    rates = [job.throughput[n] for n in sorted(job.throughput)]
    assert rates == sorted(rates)
    # Two nodes of three layers each: 24 microbatches of 90 ms, and one stage more to fill and drain.
    assert job.throughput[2] == pytest.approx(48 / (25 * 0.09))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "'throughput' must be"),
        ('{"throughput": {"x": 1}}', "'throughput' must be"),
        ('{"throughput": {"4": true}}', "'throughput' of 4 is True"),
        ('{"throughput": {"4": 1' + "0" * 400 + "}}", "it must be a number"),
        ('{"throughput": {"4": 1}, "nodes": 3}', "begins on 3 nodes"),
        ('{"throughput": {"4": 1}, "nodes": 4.5}', "whole number"),
        ('{"throughput": {"4": 1}, "change_s": -1}', "zero or more"),
        ('{"throughput": {"4": 1}, "speed": 1}', "unknown key 'speed'"),
        ('{"throughput": {"4": 1}, "layers": "a"}', "either 'throughput' or 'layers'"),
        ('{"layers": "a", "nodes": 4}', "'min_nodes' is None"),
    ],
)
def test_files_that_are_no_job(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_elastic_job(tmp_path / "job.json")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--elastic", "oobleck-bert-large", "--lose-every", "6h", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["strategies"].keys() == WAYS.keys()
    assert answer["strategies"]["elastic"]["throughput"] == pytest.approx(287.10, rel=0.012)
    assert answer["duration_s"] == 15 * 6 * 3600
    trace = tmp_path / "spot.csv"
    trace.write_text("3600,-1\n5400,+1\n")
    assert simulate.main(["--elastic", "oobleck-gpt3-2.7b", "--spot", str(trace), "--hold", "10m"]) == 0
    assert "elastic" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--elastic", "oobleck-bert-large"], "either --spot or --lose-every"),
        (["--elastic", "oobleck-bert-large", "--lose-every", "0s"], "positive time"),
        (["--elastic", "oobleck-bert-large", "--lose-every", "1h", "--duration", "0s"], "positive time"),
        (["--elastic", "/nowhere.json", "--lose-every", "1h"], "cannot be read"),
        (["--preset", "bert-128", "--hold", "1h"], "are for --elastic JOB"),
    ],
)
def test_mistakes_end_in_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(argv) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_what_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="takes 1 nodes more than there are"):
        simulate_elastic(JOB, [Change(1, -5)], 10, "elastic")
    with pytest.raises(UsageError, match="known are elastic"):
        simulate_elastic(JOB, [], 10, "magic")
    with pytest.raises(UsageError, match="positive time"):
        simulate_elastic(JOB, [], math.inf, "elastic")
