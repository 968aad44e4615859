"""All that a person may see of a run, in one table: its name, its level, its sentence, its facts. Pure.

Console, live view, the JSON lines of ``--events-log``, the commands of ``--on-event`` and the table in
docs/reference.md are made from :data:`KINDS`. ``journal_news.py`` says when each of them is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Weight(IntEnum):
    """The importance of a sentence to a person who watches a run."""

    SILENT = 0
    """The console has another sentence for the same."""
    ROUTINE = 1
    """Happens in an undisturbed run, too, or is said elsewhere. Only the live view shows it."""
    NEWS = 2
    """A loss, or what is done about it."""
    GRAVE = 3
    """Progress is lost, or the run ends."""


SILENT, ROUTINE, NEWS, GRAVE = Weight


@dataclass(frozen=True, slots=True)
class NewsKind:
    """A row of the table.

    Attributes:
        level: in JSON lines: ``info``, ``warning`` or ``error``; empty for what is told to persons only.
        weight: on the console.
        sentence: without a full stop; names in braces stand for what is known of the event.
        fields: the names of those facts that JSON lines have, too, with blanks between them.
        meaning: for the documents.
    """

    level: str
    weight: Weight
    sentence: str
    fields: str = ""
    meaning: str = ""


# fmt: off
KINDS = {
    "run_opened": NewsKind("info", ROUTINE, "a run on {size}", "checkpoint machines workers_per_machine",
        "A run begins, or goes on from a checkpoint."),
    "all_here": NewsKind("", ROUTINE, "all machines are here"),
    "all_start": NewsKind("", ROUTINE, "{way_in_words}"),
    "run_live": NewsKind("info", ROUTINE, "all are live, and go on with iteration {iteration}", "iteration",
        "All workers train for the first time."),
    "spare_joined": NewsKind("info", ROUTINE, "a spare machine joins", "name spares",
        "A machine waits as a spare."),
    "guest_joined": NewsKind("", ROUTINE, "a guest of {of} is ready"),
    "machine_lost": NewsKind("warning", NEWS, "machine {machine} is lost: {reason}", "name reason reporter",
        "A machine with workers counts as failed."),
    "spare_lost": NewsKind("warning", NEWS, "a spare machine is lost: {reason}", "name reason reporter",
        "A spare machine counts as failed."),
    "health_check_failed": NewsKind("warning", NEWS, "{reason}", "name reason",
        "A machine has failed a health check, and takes no part."),
    "machine_left_out": NewsKind("warning", NEWS, "{reason}", "name reason losses",
        "A machine, or a failure domain, was lost too often by its own fault, and is not taken again."),
    "spares_used_up": NewsKind("warning", SILENT, "no spare machine is left", "",
        "No spare is left: the next loss waits for a new machine."),
    "guest_declined": NewsKind("warning", NEWS, "{who} cannot run an empty slot, too: {reason}", "",
        "A machine cannot run an empty slot, too, for the reason given."),
    "machine_awaited": NewsKind("warning", SILENT, "the run waits for a machine for slots {slots}", "slots",
        "A slot is empty, and the run stands still until a machine joins."),
    "generation_formed": NewsKind("", NEWS, "generation {generation}: {how}"),
    "recovery_planned": NewsKind("info", NEWS, "{way_in_words}", "way reason resume",
        "The way back to training: which one, why, and from which iteration."),
    "fell_back": NewsKind("error", GRAVE, "{way_in_words}", "way reason resume",
        "Completed iterations are lost: all return to a checkpoint, or start again."),
    "statistics_lost": NewsKind("", GRAVE,
        "worker {rank} loses its own running statistics and goes on with those of worker {source}"),
    "replayed": NewsKind("", NEWS, "{who} has replayed {iterations}"),
    "recovery_finished": NewsKind("warning", NEWS,
        "all are live, and go on with iteration {resume}: back after {duration}; {cost}",
        "way reason seconds iterations_lost resume machines replayed_iterations",
        "All train again: by which way, how long it took, and what it cost."),
    "incident": NewsKind("warning", NEWS, "{line}",
        "number cause reason evidence names slots others way seconds iterations_lost times advice",
        "A failure is over: whose fault it was, the evidence, what was done, and what a person should do."),
    "communication_failed": NewsKind("warning", NEWS, "{who}: {reason}", "reason",
        "Connections broke, and no machine was found dead."),
    "replay_failed": NewsKind("warning", NEWS, "{who}: {why}", "reason",
        "A log cannot be replayed. The next way back is taken."),
    "checkpoint_damaged": NewsKind("", GRAVE, "{who}: {reason}"),
    "help_declined": NewsKind("warning", NEWS, "{who}: {reason}", "reason",
        "A survivor cannot help in a replay, which goes on without it."),
    "layout_planned": NewsKind("", NEWS, "{way_in_words}"),
    "layout_changed": NewsKind("info", SILENT, "layers have moved: {counts} on the stages",
        "layers iteration", "Layers have moved: how many are on each stage from now on."),
    "layout_declined": NewsKind("warning", NEWS, "{who}: {reason}", "reason",
        "A worker cannot take layers. They stay where they are."),
    "shares_changed": NewsKind("info", NEWS,
        "generation {generation}: replicas get {counts} samples of each batch, from iteration {iteration} on",
        "shares iteration", "Global batches are dealt anew: how many samples each replica gets."),
    "all_stop": NewsKind("", ROUTINE, "generation {generation}: all stop, since layers move"),
    "all_go_on": NewsKind("", ROUTINE, "all are live, and go on with iteration {iteration}"),
    "change_planned": NewsKind("info", NEWS, "{by} plans world {world}, on {size}{why}",
        "world machines by reason", "Another world is planned: its workers start beside those that train."),
    "change_prepared": NewsKind("info", ROUTINE,
        "world {world} is prepared: all its workers wait for their state", "world",
        "All workers of the next world have made their models."),
    "change_stops": NewsKind("", ROUTINE, "all stop after iteration {last}, since world {world} takes over"),
    "change_taken": NewsKind("", ROUTINE,
        "generation {generation}: world {world} takes over, with the state of iteration {iteration}"),
    "world_changed": NewsKind("info", NEWS,
        "all are live in world {world}, on {size}, and go on with iteration {iteration}: "
        "training stood still for {duration}", "world machines iteration seconds",
        "Another world has taken over, and trains: on how many machines, and how long training stood still."),
    "change_given_up": NewsKind("warning", NEWS, "world {world} does not take over: {reason}", "world reason",
        "A change to another world is given up. The present one trains on."),
    "straggler": NewsKind("warning", NEWS,
        "{who} takes {times:.1f} times as long as its peers would for its own work", "iteration permille",
        "A worker is persistently slower than its peers: how many times."),
    "straggler_gone": NewsKind("info", NEWS, "{who} is as fast as its peers again", "iteration permille",
        "A worker that was slower than its peers is so no more."),
    "machine_wrong": NewsKind("error", GRAVE,
        "{who} has computed iteration {iteration} wrong: {tensors}{what}",
        "ranks iteration kind tensors right",
        "A verified step was computed unlike on one machine, or on several at once (`--verify replay`); or "
        "two audits agree with each other, and not with it, or with one of the machines that they rebuilt "
        "together (`--audit`: kind `audit`)."),
    "result_changed": NewsKind("error", GRAVE,
        "something was changed between machines in iteration {iteration}: {tensors}{what}",
        "iteration kind tensors right",
        "A verified step was computed unlike, and each worker gave the same to the others: a sum of several "
        "machines, or a message, was changed on its way (`--verify replay`)."),
    "not_deterministic": NewsKind("warning", NEWS,
        "iteration {iteration} comes out unlike each time that it is computed: {tensors}. Nothing shows that "
        "a machine is at fault",
        "ranks iteration kind tensors",
        "A verified step is not deterministic by itself, so it cannot be verified; or two audits differ from "
        "a machine, and from each other, or no machine comes out as recorded."),
    "audit_marked": NewsKind("info", ROUTINE, "{what}", "begin until clean whole",
        "Spares have computed again what machines computed between two checkpoints (`--audit`): which slots "
        "came out as recorded, and whether these are all."),
    "audit_differs": NewsKind("warning", NEWS,
        "a spare computes something else in iteration {iteration} than {who}: {tensors}. Another replay "
        "decides who is wrong", "rank iteration tensors name",
        "An audit differs from what a worker has recorded. It is made once more."),
    "audit_failed": NewsKind("warning", NEWS,
        "what {who} has computed between the checkpoints of iterations {begin} and {until} cannot be "
        "audited: {problem}", "begin until problem",
        "A machine's work could not be computed again."),
    "audit_undecided": NewsKind("warning", NEWS,
        "a spare has computed something else in iteration {iteration} than {who}: {tensors}. Nothing shows "
        "who is wrong, as no second replay can be made: {problem}", "rank iteration tensors problem",
        "An audit differs from what a worker has recorded, and it could not be made once more."),
    "spare_wrong": NewsKind("error", GRAVE,
        "spare {name} has computed iteration {iteration} wrong in an audit: {tensors}. Another replay came "
        "out as machine {machine} has recorded it", "name iteration tensors",
        "A spare computes wrong: a second audit agrees with the worker."),
    "message_changed": NewsKind("error", GRAVE,
        "what {who} has sent arrived as something else: {tensors}. Two replays agree with what it has sent",
        "rank iteration tensors",
        "A message was changed on its way, or where it arrived, as two audits show."),
    "script_failed": NewsKind("warning", NEWS, "{reason}{remark}", "exit_code",
        "The script raised or exited with an error. All start again."),
    "deadline_passed": NewsKind("warning", NEWS, "{reason}", "machines",
        "Machines did not answer in time, and count as lost."),
    "drain_requested": NewsKind("info", NEWS, "{who} is asked to leave by {by}", "name by",
        "A machine is asked to hand over to a spare, and to leave."),
    "machines_requested": NewsKind("info", NEWS, "{who} asks the scheduler for {count}", "name slots",
        "The scheduler is asked for machines, for slots that none fills."),
    "machine_left": NewsKind("info", NEWS, "{who} leaves: {reason}", "name reason reporter",
        "A machine has left because it was asked to. A spare takes its place."),
    "checkpoint_committed": NewsKind("info", ROUTINE, "the checkpoint of iteration {iteration} is committed",
        "iteration", "A global checkpoint counts from now on."),
    "checkpoint_requested": NewsKind("info", ROUTINE,
        "{who} asks for a checkpoint of iteration {iteration}: {reason}", "iteration reason",
        "A checkpoint is taken early, for the reason given."),
    "fault_injected": NewsKind("warning", NEWS, "fault: {fault}", "fault",
        "A fault of `--inject` is about to happen."),
    "all_finished": NewsKind("", ROUTINE, "all workers have completed the last iteration"),
    "run_ended": NewsKind("info or error", ROUTINE, "{ending}",
        "ok reason exit_code recoveries restarts lost_seconds",
        "The run is complete, or has ended for the reason given."),  # the launcher says it as its last line
    "launcher_failed": NewsKind("error", SILENT, "{reason}", "",
        "A launcher ends although the run has not ended, for the reason given."),
    "hook_failed": NewsKind("warning", SILENT, "{reason}", "",
        "The command of `--on-event` failed or took too long. Said once."),
    "events_dropped": NewsKind("warning", SILENT, "{dropped} log events are missing here: they came too fast",
        "dropped", "Log records came faster than they could be written, and are missing."),
}
# fmt: on
"""All that a person may see, and that is not a log record, by its name."""


@dataclass(frozen=True, slots=True)
class News:
    """One sentence.

    Attributes:
        at: seconds since the run began.
        text: the sentence, without a full stop.
        weight: how much it matters to who watches.
        event: its name, a key of :data:`KINDS`, or that of a log record.
        level: in JSON lines; empty if it is not in there.
        machine: the slot of the machine that it is about.
        rank: the worker that it is about.
        fields: what else is known, JSON-ready.
    """

    at: float
    text: str
    weight: Weight = NEWS
    event: str = ""
    level: str = ""
    machine: int | None = None
    rank: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def news(event: str, at: float = 0.0, **facts: Any) -> News:
    """A row of the table, told.

    Args:
        event: its name.
        at: seconds since the run began.
        facts: what the sentence and the fields need, and which machine and worker it is about.
    """
    kind = KINDS[event]
    return News(
        at,
        kind.sentence.format(**facts),
        facts.get("weight", kind.weight),
        event,
        facts.get("level", kind.level),
        facts.get("machine"),
        facts.get("rank"),
        {name: facts[name] for name in kind.fields.split()},
    )
