"""The recorder of spans: nothing while nothing is lost, and bounded."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import swift_ft
from swift_ft.observe import spans
from swift_ft.observe.spans import FIRST_ITERATION, Recorder, Recording
from swift_ft.runtime.worker.core import _WAITS_FOR


class Clock:
    """Each look at it takes a millisecond, or so many nanoseconds."""

    def __init__(self, look_ns: int = 1_000_000) -> None:
        self.ns = 0
        self.look_ns = look_ns

    def __call__(self) -> int:
        self.ns += self.look_ns
        return self.ns


def recorded(recorder: Recorder) -> Recording:
    recording = recorder.take()
    assert recording is not None
    return recording


def names(recording: Recording) -> list[str]:
    return [span.name for span in recording.spans]


def test_without_a_loss_nothing_is_recorded() -> None:
    recorder = Recorder()
    blocks = [
        recorder.span("load", iteration=3),
        recorder.while_waiting(),
        recorder.span("read", detail=True),
    ]
    assert all(block is blocks[0] for block in blocks)  # one object, which does nothing
    with blocks[0]:
        recorder.add("append", 0)
        recorder.lap(FIRST_ITERATION)
        recorder.woke()
        recorder.saw(1, 1, 1)
        recorder.appended(1, 1)
    assert recorder.on_collective(0) is None
    assert (recorder.take(), recorder.begun) == (None, 0)
    recorder.begin()
    found = recorded(recorder)
    assert (found.spans, found.seen, found.own, found.left_out) == ((), (), (), 0)


def test_a_lap_says_how_long_the_one_before_it_took() -> None:
    recorder = Recorder(Clock())
    assert recorder.lap("nothing is recorded") == 0.0
    recorder.begin()
    assert recorder.lap("script") == 0.0
    recorder.now()
    assert recorder.lap("session") == 0.002  # two looks at the clock
    assert recorder.lap() == 0.001
    assert recorder.lap("after a pause") == 0.0


def test_spans_laps_and_threads() -> None:
    recorder = Recorder(Clock())
    recorder.begin()
    recorder.woke()
    recorder.woke()  # it was awake already
    recorder.lap("script", part=1)
    with recorder.span("load", iteration=3):
        thread = threading.Thread(target=lambda: recorder.add("detect", recorder.now()), name="sentinel")
        thread.start()
        thread.join()
    recorder.lap("replay")
    found = recorded(recorder)
    assert names(found) == ["wake", "detect", "load", "script", "replay"]
    by_name = {span.name: span for span in found.spans}
    assert (by_name["detect"].thread, by_name["load"].thread) == ("sentinel", "")
    assert (by_name["load"].facts, by_name["script"].facts) == ({"iteration": 3}, {"part": 1})
    assert by_name["script"].began < by_name["load"].began < by_name["detect"].began
    assert by_name["detect"].ended < by_name["load"].ended < by_name["script"].ended
    assert by_name["script"].ended == by_name["replay"].began
    assert found.began == by_name["wake"].began
    assert by_name["replay"].ended <= found.ended
    assert not recorder.active


def test_what_began_before_the_recording_is_in_none() -> None:
    recorder = Recorder(Clock())
    began = recorder.now()
    with recorder.span("waits since long"):
        recorder.begin()
        recorder.add("began before", began)
    recorder.begin()  # it has begun
    with recorder.span("over two"):
        first = recorded(recorder)
        recorder.begin()
    second = recorded(recorder)
    assert (names(first), names(second), recorder.begun) == ([], [], 2)


def test_a_recording_may_have_begun_earlier() -> None:
    recorder = Recorder(Clock())
    born = recorder.now()
    recorder.begin(born, awake=True)
    recorder.add("be forked", born)
    recorder.woke()  # it never slept
    found = recorded(recorder)
    assert (names(found), found.began, found.spans[0].began) == (["be forked"], born, born)


def test_only_the_first_wait_of_the_first_iteration_is_the_first() -> None:
    recorder = Recorder(Clock())
    recorder.begin()
    recorder.lap("replay")
    with recorder.while_waiting():
        pass
    assert recorder.on_collective(0) is None
    recorder.lap(FIRST_ITERATION)
    for _ in range(2):
        with recorder.while_waiting():
            pass
    assert recorder.on_collective(0) is None
    assert names(recorded(recorder)).count("first collective") == 1
    recorder.begin()
    recorder.lap(FIRST_ITERATION)
    on_end = recorder.on_collective(recorder.now())
    assert on_end is not None
    on_end(None)
    (collective,) = (span for span in recorded(recorder).spans if span.name == "first collective")
    assert collective.thread == "collectives"


def test_it_is_bounded() -> None:
    recorder = Recorder(Clock())
    recorder.begin()
    for number in range(3000):
        with recorder.span("replay an iteration", detail=True, iteration=number):
            pass
        recorder.saw(2 * number, 2 * number, recorder.now())
        recorder.appended(number, recorder.now())
    with recorder.span("connect"):  # it comes last, and matters most
        pass
    found = recorded(recorder)
    assert names(found) == ["replay an iteration"] * spans._DETAILS + ["connect"]
    assert found.left_out == 3000 - spans._DETAILS
    assert len(found.seen) == len(found.own) == spans._NOTES


def test_short_details_are_left_out() -> None:
    recorder = Recorder(Clock(1000))
    recorder.begin()
    with recorder.span("read the log", detail=True), recorder.span("append"):
        pass
    assert names(recorded(recorder)) == ["append"]


def test_entries_of_one_block_are_one_note() -> None:
    recorder = Recorder()
    recorder.begin(0)
    for position, at in ((4, 1_000), (5, 2_000), (6, 30_000), (8, 31_000)):
        recorder.saw(position, position, at)
    recorder.appended(5, 500)
    assert recorded(recorder).seen == ((4, 5, 2_000), (6, 6, 30_000), (8, 8, 31_000))


def test_events_of_a_process_before_this_one_are_not_its_own() -> None:
    recorder = Recorder(Clock())
    recorder.begin(recorder.now())
    recorder.appended(3, 0)  # worker 1 before it was replaced
    recorder.appended(4, recorder.now())
    assert [position for position, _ in recorded(recorder).own] == [4]


def names_used(path: Path) -> set[str]:
    """Names that a file gives to spans."""
    own = ("recorder", "self") if path.name == "spans.py" else ("recorder", "self._recorder")
    return {
        str(node.args[0].value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("span", "lap", "add")
        and ast.unparse(node.func.value) in own
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }


def test_the_documents_list_all_spans() -> None:
    package = Path(swift_ft.__file__).parent
    used = {FIRST_ITERATION, "wait for messages", *_WAITS_FOR.values()}.union(
        *map(names_used, package.rglob("*.py"))
    )
    text = (package.parent / "docs" / "timeline.md").read_text()
    table = text.partition("| span | of | what |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines() for name in row.split(" | ")[0].strip("| ").split(", ")}
    assert listed == used
