"""The live view's model: what is shown follows from the journal and the workers' progress alone."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from swift_ft.cli.live import render
from swift_ft.cli.watch import Progress, View
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry


class Story:
    """Feeds a view with events, one second apart."""

    def __init__(self, machines: int = 3, workers: int = 1, iterations: int | None = 60) -> None:
        self.view = View(iterations)
        self.position = 0
        self.add(ev.JobOpened(machines=machines, workers_per_machine=workers, max_failures=16))

    def add(self, *events: ev.Event) -> list[str]:
        words = []
        for event in events:
            entry = Entry(self.position, event, 1000.0 + self.position, "test")
            words += [news.text for news in self.view.apply(entry)]
            self.position += 1
        return words

    def progress(self, mode: str, *iterations: int) -> None:
        for rank, iteration in enumerate(iterations):
            self.view.progress[rank] = Progress(iteration, mode, at=0.0)

    def conditions(self) -> list[str]:
        return [row.words for row in self.view.rows()]


@pytest.fixture
def live() -> Story:
    """Three machines at iteration 47, one spare; the checkpoint of iteration 40 is committed."""
    story = Story()
    story.add(*(ev.MachineJoined(machine=name) for name in "abc"), ev.MachineJoined(machine="spare"))
    story.add(
        *(
            ev.StatusReported(rank=rank, generation=1, iteration=None, stages=(rank,), pipeline_known=True)
            for rank in range(3)
        )
    )
    story.add(*(ev.WorkerReady(rank=rank, generation=1) for rank in range(3)))
    story.add(ev.CheckpointCommitted(iteration=40, epoch=1))
    story.progress("live", 47, 47, 47)
    return story


def reported(rank: int, iteration: int | None) -> ev.StatusReported:
    return ev.StatusReported(
        rank=rank,
        generation=2,
        iteration=iteration,
        live=iteration is not None,
        stages=(rank,),
        pipeline_known=True,
    )


def test_machines_are_awaited_before_the_start() -> None:
    story = Story()
    story.add(ev.MachineJoined(machine="a"))
    assert story.conditions() == ["not here yet"] * 3
    assert story.add(ev.MachineJoined(machine="b"), ev.MachineJoined(machine="c")) == [
        "all machines are here"
    ]
    assert story.conditions() == ["starts"] * 3


def test_a_live_run_shows_completed_iterations(live: Story) -> None:
    assert [(row.iteration, row.words) for row in live.view.rows()] == [(47, "live")] * 3


def test_a_dead_machine_is_dead_until_it_is_replaced(live: Story) -> None:
    live.add(ev.MachineLost(machine="spare", reason="its agent's connection ended"))
    words = live.add(ev.MachineLost(machine="b", reason="its agent's connection ended"))
    assert words == ["machine 1 is lost: its agent's connection ended"]
    assert live.conditions() == ["waiting", "dead, a replacement is awaited", "waiting"]


def test_a_spare_replaces_a_dead_machine_at_once(live: Story) -> None:
    words = live.add(ev.MachineLost(machine="b", reason="gone"))
    assert words == ["machine 1 is lost: gone", "generation 2: a replacement for machine 1"]
    assert live.conditions() == ["leaves", "replacement, starts", "leaves"]
    live.add(reported(1, None), reported(0, 47))
    assert live.conditions() == ["waiting", "replacement, joined", "leaves"]


def test_layers_are_shown_where_they_are_and_when_they_move() -> None:
    story = Story(machines=2, workers=2)
    story.add(*(ev.MachineJoined(machine=name) for name in "ab"))

    def reports(generation: int, at: int | None) -> list[ev.Event]:
        stages = ((0, 7), (1, 6), (2, 5), (3, 4))
        every = (replace(reported(rank, at), stages=stages[rank], layers=9) for rank in range(4))
        return [replace(report, generation=generation) for report in every]

    story.add(*reports(1, None))
    assert story.conditions() == ["live, layers 0-1, 6-8", "live, layers 2-5"]
    story.add(ev.LayoutRequested(rank=0, generation=1, iteration=5, layers=(1, 1, 1, 1, 2, 1, 1, 1)))
    stopped = [ev.LayoutBoundaryReached(rank=rank, generation=1, iteration=5) for rank in range(4)]
    assert story.add(*stopped, *reports(2, 5)) == [
        "generation 2: all stop, since layers move",
        "layers move after iteration 4: 1, 1, 1, 1, 2, 1, 1, 1 on the stages",
    ]
    declined = ev.LayoutDeclined(rank=1, generation=2, reason="1 GB of memory are left")
    assert "worker 1: 1 GB of memory are left" in story.add(declined)


def test_the_samples_that_each_replica_has_are_shown_once_they_have_changed() -> None:
    story = Story(machines=2, workers=1)
    story.add(*(ev.MachineJoined(machine=name) for name in "ab"))

    def reports(generation: int, at: int | None) -> list[ev.Event]:
        every = (replace(reported(rank, at), stages=(), holds=("the model",)) for rank in range(2))
        return [replace(report, generation=generation) for report in every]

    story.add(*reports(1, None))
    assert story.conditions() == ["live", "live"]
    story.add(ev.SharesRequested(rank=0, generation=1, iteration=5, shares=(24, 8)))
    stopped = [ev.LayoutBoundaryReached(rank=rank, generation=1, iteration=5) for rank in range(2)]
    assert story.add(*stopped, *reports(2, 5)) == [
        "generation 2: replicas get 24, 8 samples of each batch, from iteration 5 on",
        "all workers have their state and continue with iteration 5",
        "all are live, and go on with iteration 5",
    ]
    assert story.conditions() == ["live, 24 of 32 samples", "live, 8 of 32 samples"]


def test_a_replay_is_counted_from_the_checkpoint(live: Story) -> None:
    live.add(ev.MachineLost(machine="b", reason="gone"))
    words = live.add(reported(0, 47), reported(1, None), reported(2, 47))
    assert words == ["survivors keep their state; worker 1 replays iterations 40 to 46"]
    assert live.conditions() == ["waiting", "loads the checkpoint of iteration 40", "waiting"]
    live.view.progress[1] = Progress(42, "replay", at=0.0)
    assert live.view.rows()[1].iteration == 42
    assert live.conditions()[1] == "replays 3 of 7"


def test_helpers_are_named_and_so_is_one_that_cannot_help(live: Story) -> None:
    live.add(ev.MachineLost(machine="b", reason="gone"))
    words = live.add(
        *(replace(reported(rank, at), max_replay_shards=4) for rank, at in ((0, 47), (1, None), (2, 47)))
    )
    assert words == [
        "survivors keep their state; worker 1 replays iterations 40 to 46, helped by worker 0, worker 2"
    ]
    assert live.conditions() == ["helps worker 1", "loads the checkpoint of iteration 40", "helps worker 1"]
    words = live.add(ev.HelpDeclined(rank=2, generation=2, reason="MemoryError: no room"))
    assert words == ["worker 2: MemoryError: no room", "generation 3: all meet again"]


def test_after_the_replay_all_are_live(live: Story) -> None:
    live.add(ev.MachineLost(machine="b", reason="gone"))
    live.add(reported(0, 47), reported(1, None), reported(2, 47))
    words = live.add(ev.WorkerReady(rank=1, generation=2, replayed=7))
    assert words == [
        "worker 1 has replayed 7 iterations",
        "all are live, and go on with iteration 47: back after 4.00 s; no completed iteration is lost",
        "incident 1 on machine 1 (cause: machine): gone. Training goes on by replay after 4.00 s. "
        "To do: look at this machine's kernel log, power and hardware",
    ]
    assert live.conditions() == ["live"] * 3


def test_what_nobody_is_left_to_report_is_not_called_nothing(live: Story) -> None:
    """All workers had died: what they had completed after the checkpoint died with them."""
    live.add(*(ev.MachineLost(machine=name, reason="gone") for name in ("a", "b", "c")))
    live.add(*(ev.MachineJoined(machine=name) for name in ("d", "e")))
    generation = live.view.state.generation
    live.add(*(replace(reported(rank, None), generation=generation) for rank in range(3)))
    words = live.add(*(ev.WorkerReady(rank=rank, generation=generation) for rank in range(3)))
    *_, live_again, incident = words
    assert live_again.endswith("; no worker is left that could say how many iterations are lost")
    assert incident.startswith(
        "incident 1 on machines 0, 1 and 2 (cause: machine): gone; with it: gone; gone."
    )
    assert "no completed iteration is lost" not in " ".join(words)


def test_a_dead_workers_last_report_is_not_its_replacements(live: Story) -> None:
    """`progress/1` still says that worker 1 is live when its machine is dead."""
    live.add(ev.MachineLost(machine="b", reason="gone"))
    assert live.view.progress[1].mode == "live"
    assert live.conditions()[1] == "replacement, starts"


def test_a_fallback_has_a_reason(live: Story) -> None:
    live.add(ev.MachineLost(machine="b", reason="gone"))
    live.add(reported(0, 47), reported(1, None), reported(2, 47))
    words = live.add(ev.ReplayFailed(rank=1, generation=2, reason="a log is torn"))
    assert words == ["worker 1: a log is torn", "generation 3: all meet again"]
    words = live.add(
        *(
            ev.StatusReported(
                rank=r, generation=3, iteration=47, live=r != 1, stages=(r,), pipeline_known=True
            )
            for r in range(3)
        )
    )
    assert words == [
        "all workers return to the checkpoint of iteration 40: worker 1 cannot replay: a log is torn"
    ]


def test_a_lost_worker_gets_its_replicas_state(live: Story) -> None:
    live.add(ev.MachineLost(machine="b", reason="gone"))
    reports = (
        ev.StatusReported(
            rank=r,
            generation=2,
            iteration=None if r == 1 else 47,
            live=r != 1,
            pipeline_known=True,
            holds=("the model",),
        )
        for r in range(3)
    )
    assert live.add(*reports)[0] == "worker 1 becomes equal to a replica; all go on with iteration 47"


def test_a_request_for_a_checkpoint_is_shown_once(live: Story) -> None:
    why = "the log nears its budget of disk"
    assert live.add(
        *(ev.CheckpointRequested(rank=rank, iteration=50, generation=1, reason=why) for rank in (2, 0))
    ) == ["worker 2 asks for a checkpoint of iteration 50: the log nears its budget of disk"]
    assert live.add(ev.CheckpointRequested(rank=1, iteration=53, generation=1, reason=why)) == [
        "worker 1 asks for a checkpoint of iteration 53: the log nears its budget of disk"
    ]


def test_a_restart_of_all_processes_is_shown() -> None:
    story = Story()
    story.add(*(ev.MachineJoined(machine=name) for name in "abc"))
    [words] = story.add(ev.SessionlessWorkers(machine="a", generation=1))
    assert words.startswith("generation 2: all processes start again: ")
    assert story.conditions() == ["replacement, starts"] * 3


def test_the_end_is_shown_once(live: Story) -> None:
    live.add(*(ev.WorkerFinished(rank=rank, generation=1) for rank in range(2)))
    assert live.conditions() == ["finished", "finished", "live"]
    assert live.add(ev.WorkerFinished(rank=2, generation=1)) == [
        "all workers have completed the last iteration"
    ]
    assert live.add(*(ev.ScriptExited(machine=name, started_in=1) for name in "abc")) == [
        "the run is complete"
    ]
    assert live.conditions() == ["finished"] * 3
    assert live.add(ev.ScriptExited(machine="a", started_in=1)) == []


def test_a_failed_run_has_a_reason(live: Story) -> None:
    assert live.add(ev.JobClosed(reason="stopped by SIGINT", exit_code=130)) == [
        "the run ends: stopped by SIGINT"
    ]
    assert live.conditions() == ["stopped"] * 3


def test_a_machines_iteration_is_that_of_its_slowest_worker() -> None:
    story = Story(machines=2, workers=2)
    story.add(ev.MachineJoined(machine="a"), ev.MachineJoined(machine="b"))
    story.progress("live", 5, 4, 6, 6)
    assert [row.iteration for row in story.view.rows()] == [4, 6]


def test_times_are_seconds_since_the_run_began() -> None:
    story = Story()
    story.view.apply(Entry(1, ev.MachineJoined(machine="x"), 1005.0, "test"))
    [news] = story.view.apply(Entry(2, ev.MachineLost(machine="x", reason="gone"), 1012.5, "test"))
    assert (news.at, news.text) == (12.5, "a spare machine is lost: gone")


def test_only_the_last_events_are_kept(live: Story) -> None:
    for iteration in range(50, 100, 2):
        live.add(ev.CheckpointCommitted(iteration=iteration, epoch=1))
    assert live.view.recent[-1].text == "the checkpoint of iteration 98 is committed"
    assert len(live.view.recent) < 12


@pytest.mark.parametrize(("iterations", "count"), [(60, "47/60"), (None, "iteration 47")])
def test_the_drawing_has_a_bar_per_machine(live: Story, iterations: int | None, count: str) -> None:
    live.view.iterations = iterations
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        console.print(render(live.view, now=1009.0))
    lines = capture.get().splitlines()
    assert lines[0].strip() == "generation 1, live, 9.00 s, 1 spare machine"
    assert [line.split()[:2] for line in lines[1:4]] == [["machine", str(slot)] for slot in range(3)]
    assert all(count in line and line.rstrip().endswith("live") for line in lines[1:4])


def test_an_empty_view_can_be_drawn() -> None:
    Console(file=io.StringIO()).print(render(View(), now=0.0))


def test_progress_prefers_the_workers_own_clock() -> None:
    assert Progress.of({"iteration": 3, "mode": "live"}, 7.0) == Progress(3, "live", 7.0)
    read = Progress.of({"iteration": 9, "mode": "finished", "bytes_logged": 5, "at": 6.5}, 7.0)
    assert read == Progress(9, "finished", 6.5, bytes_logged=5)
