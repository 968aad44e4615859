"""The tables of docs/reference.md, written from the code.

    python -m docs.reference            writes them anew
    python -m docs.reference --check    fails if one of them is old

Each table is between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. The text around the tables is
written by hand.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from docs.generated import write_or_check
from docs.house import MODULES, PACKAGE, ROOT
from swift_ft.checkpoint.layer_costs import measured_costs
from swift_ft.cli import group, simulate, store
from swift_ft.cli.chaos import main as chaos
from swift_ft.cli.live import add_status_option
from swift_ft.cli.news import KINDS
from swift_ft.cli.plan import main as plan
from swift_ft.cli.recover import main as recover
from swift_ft.cli.verb import load_verb
from swift_ft.config import detection_timings as timings
from swift_ft.config import exit_codes, store_keys
from swift_ft.config.option import Option, flag_of
from swift_ft.config.run_config import RunConfig
from swift_ft.data import FileSamples, GlobalBatches, IndexedBatches, LoaderBatches
from swift_ft.determinism import deterministic
from swift_ft.faults import Action, Target
from swift_ft.faults.failpoints import Point
from swift_ft.launch.agent.endpoint import AgentCollector
from swift_ft.launch.agent.status import AgentStatus
from swift_ft.logging import IterationStats, LogBudget, LogWriterMetrics
from swift_ft.optim import wrap_optimizer
from swift_ft.recovery.events import EVENTS
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.recovery.recoveries import Recovery
from swift_ft.runtime.degrees import degrees
from swift_ft.runtime.metrics import LogMetrics, MetricsCollector, SessionMetrics
from swift_ft.runtime.steps import Step
from swift_ft.session import Session
from swift_ft.testing.chaos.kinds import kinds
from swift_ft.testing.chaos.trial import Outcome
from swift_ft.testing.simulation import __main__ as simulation
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.undo.support import undo_support

PATH = ROOT / "docs" / "reference.md"

_WIDTH = 100
_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}

MEANINGS = {
    "variable_missing": "A variable has changed since the start of a script, and a replacement has none yet.",
    "hooks_of_first_step": "A script's hooks are others after its first step: a replacement may lack some.",
    "parameter_copied": "Parameters change outside of an optimizer's step, so that no undo brings them back.",
    "alarm_failed": "An error of swift_ft itself where something was due. All else that is due goes on.",
    "undo_not_compiled": "torch.compile fails on this machine: exact steps are as with `exact=True`.",
    "undo_compiled": "The inverse of an optimizer's step is being compiled, once for all its steps.",
    "snapshot_failed": "The journal could not be shortened now. It is tried again after the next events.",
    "errand_failed": "Something that a worker told the rendezvous store in the background was not taken.",
    "keys_not_read": "What a worker reads in the rendezvous store in the background has not come yet.",
    "slow_link": "TCP measured that a link between two workers carries less than the others do.",
    "link_is_fast_again": "A link that was named as slow is as fast as the others again.",
    "no_token": "A run on several hosts has no token: its secret can be read in the rendezvous store.",
    "connection_refused": "A stranger, or bytes that no member of the job sent. Few lines a minute.",
    "channel_over": "A connection between two machines has ended. What used it connects again, or knows why.",
    "channel_failed": "An error of swift_ft itself in serving another machine. Only that connection ends.",
    "head_changed": "A machine reads the journal through another machine from now on, or itself.",
    "not_met": "A machine goes to the rendezvous store while the job forms, since the one above it is gone.",
    "head_suspected": "A machine that passes on the journal is dead, silent or slow, and is passed over.",
    "relay_line_broken": "What follows a relay has sent something else than a message. Its line ends.",
    "token_file_open": "The group of the token file's owner can read it, and so the job's secret.",
    "store_silent": "The rendezvous store has not answered for a while. Training goes on.",
    "store_answers": "The rendezvous store answers again.",
    "store_restarted": "The process of the rendezvous store died, and the launcher has started another one.",
    "store_restored": "This machine has republished the journal in a rendezvous store that came back empty.",
    "run_abandoned": "A run had no living machine, though its store lived: a new run begins with --resume.",
    "store_not_restored": "What a lost machine had set in a lost rendezvous store is gone. The run ends.",
    "store_not_deleted": "`swift-chaos` cannot delete the store of a run that is over: delete it yourself.",
    "snapshots_off": "A job with one machine has no other one that could hold its state in memory.",
    "copies_in_their_domain": "Most machines are in one failure domain: some of their copies stay in it.",
    "copy_damaged": "A copy in memory is not what was copied. It is dropped, and the next way back is taken.",
    "copy_not_held": "A copy of a state did not reach the machine that holds it. The one before it stays.",
    "checkpoint_damaged": "A part of a checkpoint is not what was saved. All workers return to an older one.",
    "archive_failed": "The end of the run cannot be written into its store, or tidied, now.",
    "archive_left_to_agent": "A worker ends before it has archived the journal's end. Its agent does.",
    "layers_received": "A worker has taken layers that moved to it: how many bytes, in how many seconds.",
    "batches_of_iterator": "Batches come from an iterator, which goes on when a step is repeated.",
    "signal_of_earlier_run": "What a signal handler had set in the run before is not set in a resumed one.",
    "earlier_run_stopped": "A run goes on from where `session.stop()` had ended the run before.",
    "batch_position_unknown": "A resumed script ignores `step.index`. It may begin with its first batch.",
    "large_value_changes": "A tensor too large to be noted changes; neither the state nor a step has it.",
    "own_objects_change": "Later steps may read objects of the script's own that a replacement lacks.",
    "nameless_values_change": "Steps change what only a set holds: it goes back, and does not travel.",
    "library_objects_change": "Later steps may read an object of a library that goes back with none.",
    "too_many_objects": "A script holds so many objects that what is in some of them is not noted.",
    "loading_begins_again": "A data set has changed, and processes that load batches begin again with it.",
    "changed_within_epoch": "A loader's data set has changed in mid-epoch. A replacement would differ.",
    "variables_behind": "Steps go on with variables that a worker has of an earlier iteration than the rest.",
    "own_variables": "Variables that are unlike on all replicas are not taken over from one of them.",
    "own_values_lost": "A worker goes on with what another pipeline had in layers, because its own is lost.",
    "changes_between_steps_lost": "A replay lacks what a function between two steps has changed in modules.",
    "variable_too_large": "A variable of Lightning's is too large to be given to other workers.",
    "variables_missing": "A worker of Lightning's goes on without variables that were too large.",
    "variables_of_epoch_unlike": "Lines at the top of an epoch have set other values than those taken over.",
    "start_values_given": "Before its first step the script has set other values than at first.",
    "start_values_unlike": "So it has, where those were not the same on another machine: it keeps its own.",
    "variable_not_taken": "A value has changed and cannot come with the state: it is another one here.",
    "buffer_differs": "A replacement made another buffer than the lost worker, and no state holds it.",
    "checkpoint_failed": "A part of a checkpoint could not be written. The previous checkpoint stays valid.",
    "iteration_over": "A worker whose iteration took long goes on.",
    "iteration_hangs": "It takes far longer than others: where all workers are, the odd ones first.",
    "iteration_stalled": "An iteration takes far longer than others: for how long, and where the script is.",
    "cleanup_failed": "Old checkpoints or segments could not be deleted.",
    "doubted_checkpoints_stay": "Markers of checkpoints that may be wrong stay. It is tried again.",
    "cleanup_timed_out": "The run is over, and old files are left in the store.",
    "commit_failed": "A checkpoint is complete, but its marker could not be written.",
    "disk_budget_exhausted": "Senders wait until a checkpoint is committed or segments are uploaded.",
    "events_not_written": "The file of `--events-log` cannot be written. The run continues.",
    "last_checkpoint_not_committed": "The run is over, and its last checkpoint does not count. The exit "
    "code is 1 if it is that of the last iteration.",
    "replay_together": "Workers replay together because of what a line of the script communicates.",
    "log_not_kept": "The end of a log that stays is not in the store: no replay without the job can read it.",
    "loop_left": "The script has left its loop before the end. The iteration that it was in does not count.",
    "log_upload_cut_off": "A log's last upload hung at the end of a run. What it began may stay.",
    "log_not_uploaded": "A log is not in the store yet. Its writer serves it while it lives.",
    "part_copy_unusable": "A near copy of a file of a checkpoint cannot be used. Another place is asked.",
    "part_not_copied": "The local disk took no copy of a checkpoint's file. It is in the store.",
    "samples_not_served": "A worker cannot serve its files of samples to others. They read the store.",
    "samples_not_offered": "The rendezvous store does not answer, so a file of samples is not offered.",
    "samples_not_from_peer": "No other machine gives a file of samples. It is read from the store.",
    "samples_not_prefetched": "A file of samples could not be fetched in advance. Who needs it tries again.",
    "parts_not_served": "A worker cannot serve its copies of checkpoints to others. They read the store.",
    "stragglers_stay": "`--stragglers rebalance` has neither layers that move nor batches that it deals.",
    "shares_stay": "Pipelines keep equally many microbatches: their schedule cannot have other numbers.",
    "weight_not_asked_for": "Replicas have unlike shares, and the script ignores the weight of its own.",
    "log_not_served": "A worker cannot serve its log to others. A replacement reads it from the store.",
    "log_resumed": "A suspended log can be written again. The next checkpoint covers its gap.",
    "log_suspended": "A log cannot be written. Training continues, and a loss now leads to the checkpoint.",
    "log_waits": "A log cannot be written at the moment, and is tried again.",
    "step_not_verified": "A step that was to be verified has changed a large value that has no copy yet.",
    "log_whole_again": "A checkpoint covers the gap in a log.",
    "machine_failed": "The agent of a machine ended with an error.",
    "nothing_to_audit": "`--audit` was given to a training that gives no spare anything to compute again.",
    "clock_in_doubt": "Two machines have unlike clocks, and nobody knows which is wrong. Both take part.",
    "machine_stays_away": "Others cannot reach a machine that can reach them. It joins again after a while.",
    "machine_fenced": "The agent of a machine ended: it knows a journal that the others do not go on with.",
    "machine_refused": "The agent of a machine ended because of a mistake that the user can fix.",
    "metrics_not_served": "The port for metrics is not available. Training continues.",
    "nothing_to_resume_from": "The store holds no committed checkpoint. Training begins at iteration 0.",
    "no_replay_possible": "A loss leads to the checkpoint because of what a line of the script communicates.",
    "page_failed": "Metrics or the answer to a probe could not be computed.",
    "parallel_recovery_off": "Survivors cannot help in a replay, for the reason given.",
    "peer_log_unusable": "A segment could not be read from its writer. That log is read from the store now.",
    "profile_not_written": "The profile could not be measured or written. Training continues.",
    "topology_not_kept": "The store does not know the shape of the next world. `--resume` may refuse it.",
    "record_mended": "The store's `run.json` is damaged or gone. The run's own copy of it is read.",
    "scheduler_failed": "The scheduler gives no machine, or takes none back. The run goes on.",
    "recovery_gave_up": "No way back is left. The run ends.",
    "guests_instead": "`--on-loss shrink`: why no smaller world follows a loss, and machines run the lost "
    "workers, too.",
    "change_advised": "`--policy advise`: a change to other machines pays now. What it would cost and bring.",
    "change_chosen": "`--policy auto` changes to other machines, or `--on-loss shrink` to as many as before. "
    "What that is to cost and to bring.",
    "change_too_dear": "A change to other machines would pay, but for `--policy-price`. Said once.",
    "change_compared": "What a change of `--policy auto` has cost and brought, beside the forecast.",
    "script_began_slowly": "A recovery waited for what a replacement's script did before its session.",
    "store_left": "The script has ended, and what is being written into the store has not.",
    "script_end_waits": "A script has ended, and a thread, a process or an exit handler of it goes on.",
    "strays_stay": "Processes that a dead worker had started do not end: they wait for a disk or a device.",
    "process_not_started": "A process that was forked for a worker, a guest or an audit cannot begin.",
    "console_failed": "An error of swift_ft itself in the process that narrates a run and writes its events.",
    "sources_not_kept": "The disk for the program's sources is full: an edit changes what later workers run.",
    "script_misused": "The user can fix it in the script or the flags. The message says how.",
    "signal_ignored": "SIGUSR1 or SIGUSR2 came to a launcher, and these workers' scripts do not handle it.",
    "ended_together": "Where a process has no memory left the kernel ends the launcher, too.",
    "torch_is_newer": "torch is newer than those that all tests were run on: what is not protected with it.",
    "file_request_failed": "A worker could not answer a request for a file or a copy that it serves.",
    "store_keys_replaced": "An S3 store refused the keys. The machine has other ones by now, and uses them.",
    "segments_not_deleted": "Old segments could not be deleted. The next checkpoint tries again.",
    "another_run_is_there": "A run with a new name begins beside another one: `--rdzv-id` may be mistyped.",
    "source_changed": "A file of the program was edited. The run goes on with what it began with.",
    "source_lost": "A main file that could not be kept was edited: no machine here can replace a lost one.",
    "statistics_lost": "A worker goes on with a replica's running statistics, because its own are lost.",
    "wait_over": "A wait that was announced is over, or given up.",
    "waiting": "A wait takes more than 10 s: what for, how long already, and until when.",
    "fault_met": "A fault of `--inject` meets the first of the calls of the store that it makes fail.",
    "store_waited_for": "The store is full, not writable, gone, or does not answer, and is tried again.",
    "own_gradients_not_noted": "`--audit`: a replica's step cannot be noted. Spares audit it no more.",
    "worker_file_not_written": "What is kept of a worker is not in the store: the line says what that costs.",
    "recording_not_written": "The trace of a recovery is without what a process did in it.",
    "worker_history_left": "A worker ends before it has noted its last steps in the store.",
    "recordings_not_read": "The report of --events-out is without what processes did in recoveries.",
    "layer_costs_found": "A LayerStack gets the costs that a run of the store has measured.",
    "layers_too_large": "In no cut of a LayerStack do all layers fit into the memory of their workers.",
    "layer_costs_left_out": "A run's costs of layers are damaged: an older run's are taken.",
    "worker_fenced": "A worker found that it has been replaced, and ended.",
    "worker_came_back": "A silent worker answered just after it was reported: the deadline was too short.",
    "output_ended": "A launcher's output cannot be written any more. The files of its workers' output go on.",
    "worker_silent": "An agent kills a worker that sent no heartbeat in time.",
    "worker_stuck": "torch did not end a wait. The worker ends and is replaced.",
}
"""What each event of the package's loggers means to an operator."""

EXIT_CODES = {
    "0": "the run is complete, or this machine was asked to leave and has left",
    "1": "the run gave up, and one line says why; a fault of `--inject` never struck; `--check` found "
    "something unprotected",
    "EXIT_USAGE": "a mistake that the user can fix; one line per mistake",
    "EXIT_FENCED": "the machine was replaced and may not go on",
    "EXIT_KEPT_OUT": "this machine takes no part, and the run goes on with another one: it differs from the "
    "others, fails a [health check](how-to/incidents.md#health-checks), or was [lost too "
    "often](how-to/incidents.md#what-comes-again)",
    "EXIT_NOT_STARTED": "a process could not be started",
    "130, 143": "SIGINT, SIGTERM ended it",
    "any other": "the exit code of the script that failed",
}
"""The meaning of each exit code of swift-run: those that have a name in the code are called by it."""

_INTERNAL = {"EXIT_RENDEZVOUS_LOST"}  # between the processes of one swift-run


def document(text: str) -> str:
    """The reference with its tables written anew.

    Args:
        text: the present document.

    Raises:
        LookupError: if the document has no place for a table, or a place for an unknown one.
    """
    places = re.findall(r"<!-- begin ([\w-]+) -->", text)
    if sorted(places) != sorted(TABLES):
        raise LookupError(f"docs/reference.md has places for {places}, and the tables are {list(TABLES)}")
    for name, make in TABLES.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n" + "\n".join(make()).strip() + f"\n\n{end}{after}"
    return text


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


# ---------------------------------------------------------------------------------------------- command lines


def _flags() -> Iterator[str]:
    def rows() -> Iterator[tuple[str, str]]:
        for field in dataclasses.fields(RunConfig):
            option: Option = field.metadata["option"]
            yield (
                f"`{flag_of(field.name)}{f' {option.metavar}' if option.metavar else ''}`",
                _said(option.help),
            )

    status = argparse.ArgumentParser(add_help=False)
    add_status_option(status)
    more = ((_names_of(action), _said(action.help or "")) for action in status._actions)
    return _table(("flag", "meaning"), (*rows(), *more))


def _exit_codes() -> Iterator[str]:
    names = {name for name in vars(exit_codes) if name.startswith("EXIT_")}
    if odd := names ^ _INTERNAL ^ {name for name in EXIT_CODES if name.startswith("EXIT_")}:
        raise LookupError(
            f"say in EXIT_CODES of docs/reference.py what each code means, no other: {sorted(odd)}"
        )
    rows = ((str(getattr(exit_codes, name, name)), meaning) for name, meaning in EXIT_CODES.items())
    return _table(("code", "meaning"), rows)


def _names_of(action: argparse.Action) -> str:
    """An option or a positional argument with its value, as code."""
    value = "" if action.nargs == 0 else _value_of(action)
    names = ", ".join(action.option_strings)
    return f"`{f'{names} {value}'.strip()}`"


def _options_of(parser: argparse.ArgumentParser) -> Callable[[], Iterator[str]]:
    def rows() -> Iterator[tuple[str, str]]:
        for action in parser._actions:
            if {"-h", "--help-all", "--version"} & {*action.option_strings}:  # said once for all commands
                continue
            required = " (required)" if action.required and "default:" not in (action.help or "") else ""
            yield _names_of(action), _said(action.help or "") + required

    return lambda: _table(("flag", "meaning"), rows())


def _verbs_of(program: str, package: str, verbs: Iterable[str]) -> Callable[[], Iterator[str]]:
    """The verbs of a command, each with its arguments."""

    def lines() -> Iterator[str]:
        for name in verbs:
            verb = load_verb(package, name)
            own = argparse.ArgumentParser(prog=name)
            verb.declare(own)
            positional = " ".join(_value_of(action) for action in own._actions if not action.option_strings)
            yield f"### `{program} {name}{f' {positional}' if positional else ''}`"
            yield ""
            yield _said(verb.description.strip())
            yield ""
            yield from _options_of(own)()
            yield ""

    return lines


def _value_of(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


_VERBS = "|".join(sorted({*recover.VERBS, *plan.VERBS}))
_TYPED = re.compile(
    rf"(?<![\w`-])(swift-[a-z]+(?!\[)\b(?: (?:{_VERBS})\b)?(?: --[a-z][a-z-]+)?|--[a-z][a-z-]+|PORT \+ r)"
)
"""A command with its verb and flag, or a flag alone."""


def _said(words: str) -> str:
    """A help text as a table's cell: what a user types is set as code."""
    return _TYPED.sub(r"`\1`", words)


# ----------------------------------------------------------------------------------------------- docstrings


def _markdown(text: str) -> str:
    """A docstring's markup as Markdown's: roles and double backquotes become code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`").replace("`swift_ft.Session`", "`Session`")


_HEADING = "title of entries: "


def _sections(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """The paragraphs of a Google docstring, and the entries of each of its sections.

    Sections of one kind may have titles, as ``Args: the first day``, which come before their entries.
    """
    paragraphs: list[str] = []
    sections: dict[str, list[str]] = {}
    for block in inspect.cleandoc(text).split("\n\n"):
        head, *lines = block.splitlines()
        if (found := re.fullmatch(r"(Args|Attributes|Raises|Returns):(?: (.+))?", head)) and lines:
            entries: list[str] = [f"{_HEADING}{found[2]}"] if found[2] else []
            for line in lines:
                if line.startswith("     "):
                    entries[-1] += " " + line.strip()
                else:
                    entries.append(line.strip())
            sections.setdefault(found[1], []).extend(_markdown(entry) for entry in entries)
        else:
            paragraphs.append(_markdown(" ".join(line.strip() for line in block.splitlines())))
    return paragraphs, sections


def _first_sentence(documented: Any) -> str:
    return _sections(documented.__doc__ or "")[0][0]


def _entry(text: str) -> str:
    """An argument or an error as an item of a list; a title as a line of its own."""
    if text.startswith(_HEADING):
        title = text.removeprefix(_HEADING)
        return f"\n**{title[0].upper()}{title[1:]}**\n"
    name, colon, words = text.partition(": ")
    return f"- `{name}`: {words}" if colon and re.fullmatch(r"\w+", name) else f"- {text}"


def _describe(documented: Any) -> Iterator[str]:
    paragraphs, sections = _sections(documented.__doc__ or "")
    for paragraph in paragraphs:
        yield from (paragraph, "")
    for name, title in (("Args", ""), ("Attributes", ""), ("Returns", "Returns"), ("Raises", "Raises")):
        if name not in sections:
            continue
        if title == "Returns":
            yield from (f"Returns: {' '.join(sections[name])}", "")
            continue
        if title:
            yield from (f"{title}:", "")
        yield from (_entry(entry) for entry in sections[name])
        yield ""


def _signature(name: str, function: Callable[..., Any]) -> str:
    parameters = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else _Shown(p.default))
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]
    return f"{name}{inspect.Signature(parameters)}"


class _Shown:
    """A default value that is shown as a user writes it."""

    def __init__(self, value: Any) -> None:
        self._value = value.value if isinstance(value, Enum) else value

    def __repr__(self) -> str:
        if isinstance(self._value, str):
            return f'"{self._value}"'
        if isinstance(self._value, LogBudget):
            return "LogBudget()"
        if isinstance(self._value, int) and self._value >= 1 << 20:
            return f"{self._value >> 20} << 20"
        return repr(self._value)


def _front_door() -> Iterator[str]:
    """What ``swift_ft`` itself exports, except the metrics."""
    yield from (*_callable("Session", Session), *_methods("session", Session))
    yield from ("### `Step`", "", *_describe(Step))
    yield from (*_callable("LayerStack", LayerStack), *_methods("model", LayerStack))
    for exported in (LogBudget, wrap_optimizer, undo_support, deterministic, degrees, measured_costs):
        yield from _callable(exported.__name__, exported)
    for batches in (IndexedBatches, GlobalBatches, FileSamples, LoaderBatches):
        yield from _callable(f"data.{batches.__name__}", batches)


def _callable(name: str, exported: Callable[..., Any]) -> Iterator[str]:
    signature = _signature(f"swift_ft.{name}", exported)
    if len(signature) > _WIDTH:  # one argument per line
        head, _, arguments = signature.removesuffix(")").partition("(")
        signature = f"{head}(\n    {arguments.replace(', ', f',{chr(10)}    ')},\n)"
    yield from (f"### `{name}`", "", "```python", *signature.splitlines(), "```", "")
    yield from _describe(exported)


def _methods(instance: str, kind: type) -> Iterator[str]:
    for name, value in vars(kind).items():
        if not name.startswith("_"):
            shown = name if isinstance(value, property) else _signature(name, value)
            yield from (f"#### `{instance}.{shown}`", "")
            yield from _describe(value)


def _fields_of(*classes: type) -> Callable[[], Iterator[str]]:
    """The attributes of dataclasses, each class under its name."""

    def lines() -> Iterator[str]:
        for documented in classes:
            _, sections = _sections(documented.__doc__ or "")
            yield from (f"`{documented.__name__}`: {_first_sentence(documented)}", "")
            yield from (_entry(entry) for entry in sections["Attributes"])
            yield ""

    return lines


def _members_of(kind: type[Enum], column: str) -> Callable[[], Iterator[str]]:
    """The values of an enumeration, with the text below each of them."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    words: dict[str, str] = {}
    name = ""
    for node in body.body:
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            words[name] = " ".join(_sections(str(node.value.value))[0])
    return lambda: _table((column, "meaning"), ((f"`{m.value}`", words.get(m.name, "")) for m in kind))


# ---------------------------------------------------------------------------- metrics, the log, the journal


def _prometheus() -> Iterator[str]:
    nothing = LogMetrics(IterationStats(), IterationStats(), LogWriterMetrics(), 0, 0, 0.0, False, 0, 0, True)
    session = SessionMetrics(0, 0, 0, False, 0, 0, 0, 1.0, 0.0, 0.0, nothing)
    families = list(MetricsCollector(lambda: session).collect())
    return _families(families)


def _families(families: Iterable[Any]) -> Iterator[str]:
    return _table(
        ("metric", "type", "meaning"),
        ((f"`{_sample_name(f)}`", f.type, f.documentation) for f in families),
    )


def _sample_name(family: Any) -> str:
    return str(family.name) + ("_total" if family.type == "counter" else "")


def agent_metrics() -> dict[str, Any]:
    """The families that an agent serves, by the name that a query uses."""
    return {_sample_name(f): f for f in AgentCollector(AgentStatus(loop_limit_s=1.0)).collect()}


@dataclasses.dataclass(frozen=True, slots=True)
class LogCall:
    """One place that logs.

    Attributes:
        logger: the logger's name.
        level: the level's name.
        event: the event's name; None if it has none.
        fields: the other keys in ``extra``.
        line: where it is, for a message.
    """

    logger: str
    level: str
    event: str | None
    fields: tuple[str, ...]
    line: str


def log_calls(modules: Mapping[str, Path] = MODULES) -> Iterator[LogCall]:
    """Every call of a module's logger."""
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in _LEVELS or ast.unparse(node.func.value) != "_logger":
                continue
            level = "error" if node.func.attr == "exception" else node.func.attr
            extra = next((k.value for k in node.keywords if k.arg == "extra"), None)
            facts = {}
            if isinstance(extra, ast.Dict):
                keys = [key.value for key in extra.keys if isinstance(key, ast.Constant)]
                facts = dict(zip(map(str, keys), extra.values, strict=True))
            event = facts.pop("event", None)
            yield LogCall(
                f"swift_ft.{module}",
                level,
                str(event.value) if isinstance(event, ast.Constant) else None,
                tuple(facts),
                f"{path.name}:{node.lineno}",
            )


def _log_events() -> Iterator[str]:
    found: dict[str, list[LogCall]] = {}
    for call in log_calls():
        if call.event is not None:
            found.setdefault(call.event, []).append(call)
    if found.keys() != MEANINGS.keys():
        odd = sorted(found.keys() ^ MEANINGS.keys())
        raise LookupError(f"say in MEANINGS of docs/reference.py what each event means, and no other: {odd}")

    def all_of(values: Iterable[str]) -> str:
        return ", ".join(f"`{value}`" for value in dict.fromkeys(values))

    rows = (
        (
            f"`{event}`",
            " or ".join(dict.fromkeys(call.level for call in calls)),
            all_of(call.logger for call in calls),
            all_of(field for call in calls for field in call.fields),
            MEANINGS[event],
        )
        for event, calls in sorted(found.items())
    )
    return _table(("event", "level", "logger", "fields", "meaning"), rows)


def _kinds_of_faults() -> Iterator[str]:
    rows = (
        (f"`{one.name}`", one.meaning, "yes" * one.needs_networks, "yes" * one.by_default) for one in kinds()
    )
    return _table(("fault", "meaning", "needs --networks", "drawn by default"), rows)


def _operator_events() -> Iterator[str]:
    rows = (
        (f"`{name}`", kind.level, ", ".join(f"`{field}`" for field in kind.fields.split()), kind.meaning)
        for name, kind in KINDS.items()
        if kind.level
    )
    return _table(("event", "level", "fields", "meaning"), rows)


def _journal_events() -> Iterator[str]:
    def rows() -> Iterator[tuple[str, str, str]]:
        for name, kind in EVENTS.items():
            fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
            yield f"`{name}`", fields, _first_sentence(kind)

    return _table(("event", "fields", "meaning"), rows())


def template_of(kind: store_keys.Kind, **given: Any) -> str:
    """A kind of key with its parameters in braces, other than those that are given."""
    values = dict(given)
    marks: dict[str, int] = {}
    for name, annotation in inspect.get_annotations(kind.make).items():
        if name not in given and name != "return":
            mark = marks[name] = 90001 + len(marks)
            values[name] = mark if annotation == "int" else (mark,) if "Sequence" in annotation else str(mark)
    key = kind.make(**values)
    for name, mark in marks.items():
        key = re.sub(f"0*{mark}", f"{{{name}}}", key)  # some numbers have zeros before them
    return key


def _store_keys() -> Iterator[str]:
    def rows() -> Iterator[tuple[str, str, str, str, str]]:
        run = f"{store_keys.prefix_of('RUN')}/"
        for kind in store_keys.KINDS:
            key = re.sub(r"{(\w+)}", lambda name: name[1].upper(), template_of(kind))
            whole = f"{store_keys.prefix_of(kind.namespace)}/{key}".removeprefix(run)
            yield f"`{whole}`", _first_sentence(kind.make), kind.set_by, kind.read_by, kind.until

    return _table(("key", "what is in it", "set by", "read by", "of use until"), rows())


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """A line of the table of detection's timings.

    Attributes:
        name: in the code.
        value: seconds, if the name ends with ``_S``; else a number or shares.
        group: the heading above it.
        words: what it is, and why it is no other.
        users: files of the package that read it.
    """

    name: str
    value: Any
    group: str
    words: str
    users: tuple[str, ...]


def detection_timings_table() -> Iterator[Timing]:
    """The table, read from the file that declares it."""
    path = Path(inspect.getfile(timings))
    text = path.read_text()
    headings = {n: line for n, line in enumerate(text.splitlines(), 1) if line.startswith("# ---")}
    users: dict[str, list[str]] = {}
    for module in MODULES.values():
        for name in set(re.findall(r"\btimings\.([A-Z_]+)\b", module.read_text())):
            users.setdefault(name, []).append(module.relative_to(PACKAGE).as_posix())
    body = ast.parse(text).body
    for declared, words in itertools.pairwise(body):
        if isinstance(declared, ast.Assign) and isinstance(words, ast.Expr):
            name = ast.unparse(declared.targets[0])
            heading = headings[max(n for n in headings if n < declared.lineno)].lstrip("# -")
            said = " ".join(str(ast.literal_eval(words.value)).split())
            yield Timing(name, getattr(timings, name), heading, said, tuple(sorted(users.get(name, ()))))


def _detection_timings() -> Iterator[str]:
    def value_of(timing: Timing) -> str:
        if isinstance(timing.value, tuple):
            return ", ".join(f"{share:g}" for share in timing.value)
        return f"{timing.value:g} s" if timing.name.endswith("_S") else f"{timing.value:g}"

    for heading, rows in itertools.groupby(detection_timings_table(), lambda timing: timing.group):
        yield f"**{heading[0].upper()}{heading[1:]}**"
        yield ""
        columns = "timing", "value", "what it is, and why", "read in"
        yield from _table(
            columns,
            (
                (
                    f"`{timing.name}`",
                    value_of(timing),
                    _markdown(timing.words),
                    ", ".join(f"`{user}`" for user in timing.users),
                )
                for timing in rows
            ),
        )
        yield ""


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "swift-run": _flags,
    "exit-codes": _exit_codes,
    "front-door": _front_door,
    "swift-recover": _verbs_of("swift-recover", "swift_ft.cli.recover", recover.VERBS),
    "swift-group": _options_of(group.parser()),
    "swift-sim": _options_of(simulate.parser()),
    "swift-plan": _verbs_of("swift-plan", "swift_ft.cli.plan", plan.VERBS),
    "swift-chaos": _options_of(chaos.parser()),
    "faults": _kinds_of_faults,
    "store": _options_of(store.parser()),
    "store-keys": _store_keys,
    "detection-timings": _detection_timings,
    "simulation": _options_of(simulation.parser()),
    "metrics": _fields_of(SessionMetrics, LogMetrics, IterationStats, LogWriterMetrics),
    "agent-metrics": lambda: _families(agent_metrics().values()),
    "prometheus": _prometheus,
    "outcomes": _members_of(Outcome, "outcome"),
    "actions": _members_of(Action, "action"),
    "targets": _members_of(Target, "target"),
    "failpoints": _members_of(Point, "point"),
    "log-events": _log_events,
    "operator-events": _operator_events,
    "journal-events": _journal_events,
    "modes": _members_of(RecoveryMode, "mode"),
    "recovery": _fields_of(Recovery),
}
"""What fills each place of the document."""


if __name__ == "__main__":
    sys.exit(write_or_check("docs.reference", __doc__, lambda: {PATH: document(PATH.read_text())}))
