"""Variables of a script that have changed since its start: they travel with the state, to be put in place.

A replacement runs the script from its beginning. What the script changed at some iteration (a counter, a
flag, a dropout's p, an average in an attribute, the state of a generator) comes with the state, from a
checkpoint or from a replica. What has not changed is as the script makes it, and does not travel: names of
machines, ranks, paths.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.plain_classes import NotPlainError
from swift_ft.checkpoint.plain_values import Encoder, classes_in
from swift_ft.checkpoint.step import carried_lines as lines
from swift_ft.checkpoint.step.behind import say_what_is_behind
from swift_ft.checkpoint.step.frozen import Copier, same
from swift_ft.checkpoint.step.kinds import GENERATORS, has_dict, is_fixed, is_of_session
from swift_ft.checkpoint.step.namespaces import MISSING
from swift_ft.checkpoint.step.outside import Outside
from swift_ft.checkpoint.step.places import (
    ALIKE,
    AT_START,
    CELLS,
    FLAGS,
    OBJECT,
    OF_EPOCH,
    UNSAVED,
    Arrived,
    Place,
    Saved,
    in_words,
    is_object_of_script,
    key_of,
    place_of_key,
    with_own,
)
from swift_ft.checkpoint.step.placing import Placing
from swift_ft.checkpoint.step.reach import content_of
from swift_ft.checkpoint.step.references import UNKNOWN, References
from swift_ft.checkpoint.step.script import ScriptVariables
from swift_ft.checkpoint.step.traces import Trace, trace_of
from swift_ft.checkpoint.step.unordered import NAMELESS
from swift_ft.program.loop_frame import FUNCTIONS, loop_frame, loop_frames, set_variables
from swift_ft.program.signal_handlers import SetByHandler, set_by_handlers

_OF_PROCESS = (torch.device, set, frozenset)
"""Classes of values that are rightly other ones in another process: its device, and the order of a set."""


class CarriedVariables:
    """The variables of a script that have changed since its start, and their values.

    Args:
        variables: finds them.
        outside: tells of what cannot travel.

    Attributes:
        own, of_own, behind: of :class:`Arrived`, for what is taken over now.
        alike: what was found to be equal on all replicas.
        arrived: what was taken over since the last step; None if nothing was.
        began_anew: steps have begun with this process's own values, and not with those of an earlier one.
    """

    def __init__(self, variables: ScriptVariables, outside: Outside) -> None:
        self._variables = variables
        self._outside = outside
        self._start: dict[Place, Any] = {}
        self._first: Mapping[Place, Any] = {}  # of an earlier process, until a state arrives
        self.began_anew = False
        # What was there as this process began its first step; empty before.
        self._before_steps: frozenset[Place] = frozenset()
        self._paths_before_steps: frozenset[str] = frozenset()
        self._made_before: dict[Place, Trace] = {}  # what could not be copied then
        self._given: set[Place] = set()  # before the first step, where the script itself had made nothing
        self._generators: dict[Place, tuple[Any, int]] = {}
        self._at_epoch: dict[Place, Any] = {}  # as the steps of this epoch began
        self.own: frozenset[Place] = frozenset()
        self.of_own: Saved = {}
        self.behind: frozenset[Place] = frozenset()
        self.alike: frozenset[Place] = frozenset()
        self.arrived: Arrived | None = None
        self._unlike_at_top: list[str] = []  # of what was taken over last
        self._at_top_of_epoch = False
        self._named: set[Place] = set()  # an audit takes variables over again and again

    def remember(self) -> None:
        """The session starts: from now on, what is unlike this travels."""
        self._variables.keep_paths()
        self._start = self._all_now()
        for value in self._start.values():
            if not isinstance(value, Trace):
                self._variables.state.known.add(classes_in(value))

    def at_start(self, most: int) -> Saved:
        """Values that the script itself had set when the session started: not those of torch's objects.

        Args:
            most: variables at most.
        """
        of_torch = {
            namespace.path
            for namespace, _ in self._variables.slots
            if isinstance(namespace.owner, nn.Module | Optimizer) or namespace.is_of_buffers
        }
        of_torch.add(FLAGS)
        found: dict[str, dict[str, Any]] = {}
        loop_first = sorted(self._start, key=lambda place: place[0] not in FUNCTIONS)
        of_script = (place for place in loop_first if place[0] not in of_torch)
        for path, name in islice(filter(self._begins_alike, of_script), most):
            found.setdefault(path, {})[name] = self._start[path, name]
        return found

    def _begins_alike(self, place: Place) -> bool:
        """Whether a variable's first value can be noted, and would be the same in another process."""
        value = self._start[place]
        return value is not MISSING and not _is_of_process(value) and self._is_plain(value)

    def begin_with(self, values: Mapping[Place, Any]) -> None:
        """Another process in the place of this one had these values when the session started.

        So has this one, once a state arrives to go on with. Without any it begins as its script does.
        """
        self._first = values

    def steps_begin(self) -> None:
        """The first step in this process begins: what there is by now, no step has made."""
        self.began_anew, self._first = bool(self._first), {}
        self._variables.keep_paths()
        self._before_steps = frozenset(place for place, _ in self._values() if place not in self._given)
        self._paths_before_steps = frozenset(self._variables.paths)
        self._made_before = {p: now for p, now in self._all_now().items() if isinstance(now, Trace)}

    def epoch_begins(self) -> None:
        """The script's loop over epochs has asked for the next one."""
        frame = loop_frame()
        self._variables.epoch_begins(frame.f_code if frame is not None else None)
        self._at_epoch = {}
        self._at_top_of_epoch = True

    def top_is_over(self) -> None:
        """The script is through with its lines at the top of an epoch."""
        self._variables.look()
        self._variables.keep_paths_of_epoch()
        self._at_top_of_epoch = False
        self._at_epoch = self._all_now()

    def take_over_again(self, arrived: Arrived) -> None:
        """As :meth:`take_over`, of what has arrived at another time."""
        before = self.own, self.of_own, self.behind
        self.own, self.of_own, self.behind = arrived.own, arrived.of_own, arrived.behind
        self.take_over(arrived.saved)
        self.own, self.of_own, self.behind = before

    def say_what_is_unlike(self) -> None:
        """Name what the lines at the top of the epoch have set to other values than those taken over."""
        if self._unlike_at_top:
            lines.say_unlike_at_top(self._unlike_at_top)

    def say_what_is_behind(self, arrived: Arrived) -> None:
        """Name what steps go on with, and what is of another iteration than all else that has arrived."""
        if arrived.behind:
            handed_over = {
                path: {name: value for name, value in values.items() if (path, name) not in arrived.own}
                for path, values in arrived.saved.items()
            }
            say_what_is_behind(arrived.behind, handed_over, loop_frames(self._variables.epochs))

    def say_what_is_missing(self, arrived: Arrived) -> None:
        """Name what has arrived for a place that the lines at the top of the epoch have not made either."""
        saved = arrived.saved
        for path in saved.keys() - {*FUNCTIONS, CELLS, FLAGS, *self._variables.paths}:
            self._say_missing((path, next(iter(saved[path]))))

    def epoch_begins_again(self) -> None:
        """The state is of this epoch's beginning: the script has been at its top, and has gone on since."""
        placing = self._placing()
        for place, value in [*self._values()]:
            before = self._at_epoch.get(place, UNKNOWN)
            if before is not UNKNOWN:
                self._put_back(placing, place, value, before)

    def to_save(self) -> dict[str, dict[str, Any]]:
        """Values that are not those of the start, by path and name.

        Raises:
            IncompleteStateError: a module has changed that is not in the state.
        """
        self._variables.look()
        self._outside.check()
        return self._changed(lambda _: True)

    def in_modules(self) -> dict[str, dict[str, Any]]:
        """As :meth:`to_save`, of the state's modules alone: attributes, and which parameters are frozen."""
        self._variables.look()
        held = {id(module) for module in self._variables.state.tree.modules()}
        paths = {path for path, module in self._variables.modules() if id(module) in held}
        return self._changed(lambda path: path in paths or path == FLAGS)

    def changes_since(self, before: Saved, now: Saved) -> dict[str, dict[str, Any]]:
        """The values for :meth:`put` by which what was saved at two moments differs."""
        then, here = self.digests_of(before), self.digests_of(now)
        found: dict[str, dict[str, Any]] = {}
        for key in sorted(key for key in {*then, *here} if then.get(key) != here.get(key)):
            path, name = place_of_key(key)
            found.setdefault(path, {})[name] = now[path][name] if key in here else {AT_START: True}
        return found

    def _changed(self, wanted: Callable[[str], bool]) -> dict[str, dict[str, Any]]:
        changed: dict[str, dict[str, Any]] = {}
        copier = self._copier()
        for (path, name), value in self._values():
            if not wanted(path):
                continue
            before = self._start.get((path, name), MISSING)
            if value is before and is_fixed(value):
                continue
            now = self._now(copier, value)
            if same(now, before) or same(now, self._made_before.get((path, name), UNKNOWN)):
                continue
            kept = now if self._is_plain(now) else {UNSAVED: self._trace(value).words}
            at_epoch = MISSING if (path, name) in self._start else self._at_epoch.get((path, name), MISSING)
            if at_epoch is not MISSING and same(now, at_epoch):
                kept = {OF_EPOCH: kept, **({ALIKE: True} if (path, name) in self.alike else {})}
            changed.setdefault(path, {})[name] = kept
        return changed

    def digests(self) -> dict[str, int]:
        """A digest of each value that is not that of the start, by path and name, a line feed between."""
        return self.digests_of(self.to_save())

    def digests_of(self, saved: Saved) -> dict[str, int]:
        """As :meth:`digests`, of what :meth:`to_save` has returned. Any thread may ask for it."""
        return {
            key_of((path, name)): self.digest(value)
            for path, values in saved.items()
            for name, value in values.items()
        }

    def packed(self, saved: Saved, most_bytes: int) -> str:
        """Those of the saved values that are small, as text. Any thread may ask for it.

        Args:
            saved: by :meth:`to_save`.
            most_bytes: of all together; what does not fit is left out.
        """
        small: dict[str, dict[str, Any]] = {}
        around = len(self._variables.state.pack(None))  # of all values once
        for path, values in saved.items():
            for name, value in values.items():
                size = len(self._variables.state.pack(value)) - around
                if size <= most_bytes:
                    most_bytes -= size
                    small.setdefault(path, {})[name] = value
        return base64.b64encode(self._variables.state.pack(small)).decode()

    def unpacked(self, text: str) -> Saved:
        """The inverse of :meth:`packed`."""
        found: Saved = self._variables.state.unpack(base64.b64decode(text))
        return found

    def digests_of_earlier(self, saved: Saved) -> dict[str, int]:
        """A digest of each variable that was there before the first step, by its name.

        A step cannot begin with what a step has made: in the first one that was not there.

        Args:
            saved: by :meth:`to_save`.

        Returns:
            0 for a value as it was at the start, -1 for one that cannot be saved, and so not be compared.
        """
        found = {}
        for path, name in self._before_steps:
            value = saved.get(path, {}).get(name, MISSING)
            if isinstance(value, dict):
                value = value.get(OF_EPOCH, value)
            unsaved = isinstance(value, dict) and UNSAVED in value
            digest = 0 if value is MISSING else -1 if unsaved else self.digest(value)
            found[in_words((path, name))] = digest
        return found

    def digest(self, value: Any) -> int:
        """A digest of a value that can be saved. Any thread may ask for it."""
        return xxhash.xxh3_64_intdigest(self._variables.state.pack(value))

    def digests_of_generators(self) -> dict[str, int]:
        """A digest of each generator that the script has made before its first step, by path and name.

        That of its state at the start, or now if it is younger.
        """
        copier = self._copier()
        found = {}
        for (path, name), generator in self._generators_now():
            state = self._start.get((path, name), MISSING)
            state = self._now(copier, generator) if state is MISSING else state
            if self._is_plain(state):
                found[key_of((path, name))] = self.digest(state)
        return found

    def note_generators(self) -> None:
        """Note which generators there are, and how they were seeded: see :meth:`goes_on`."""
        # Held, since a new one might be made in the same place of the memory.
        self._generators = {place: (value, _seed_of(value)) for place, value in self._generators_now()}

    def goes_on(self, place: Place) -> bool:
        """Whether a generator is the one that was noted, and was not seeded since."""
        now = dict(self._generators_now()).get(place)
        generator, seed = self._generators.get(place, (None, 0))
        return now is not None and now is generator and _seed_of(now) == seed

    def _generators_now(self) -> Iterator[tuple[Place, Any]]:
        yield from ((place, value) for place, value in self._values() if isinstance(value, GENERATORS))

    def take_over(self, saved: Saved) -> None:
        """Put in place what was saved, give others the values of the start, and remove what was not there."""
        self.arrived = Arrived(saved, self.own, self.of_own, self.behind)
        saved, left = with_own(saved, self.own, self.of_own)
        self._unlike_at_top.clear()
        if self._paths_before_steps:  # else no step can have made any, and a replacement is waited for
            self._variables.look()
        places, placing = dict(self._values()), self._placing()
        of_signals = self._of_signals(saved)
        self._begin_with_first()
        if not self._paths_before_steps:
            arrived = {(path, name) for path, values in saved.items() for name in values}
            self._given |= {place for place in arrived if places.get(place, MISSING) is MISSING}
        for path, values in saved.items():
            for name, value in values.items():
                if isinstance(value, dict) and OF_EPOCH in value:
                    alike = ALIKE in value or (path, name) in self.alike
                    value = value[OF_EPOCH]
                    if (path, name) in places:
                        value = self._of_epoch((path, name), value, alike=alike)
                    elif self._is_set((path, name)):  # to something that stays: a progress bar, say
                        continue
                    if value is UNKNOWN or isinstance(value, Trace):
                        continue
                if (path, name) in left or (path, name) in of_signals:
                    continue
                if is_object_of_script(value) and not self._may_be_given((path, name)):
                    continue
                if isinstance(value, dict) and UNSAVED in value:
                    self._say_not_taken((path, name), value[UNSAVED])
                    continue
                self._put(placing, (path, name), places.get((path, name), MISSING), value)
        for place, value in places.items():
            before = self._start.get(place, MISSING if self._made_in_a_step(place) else UNKNOWN)
            before = self._made_before.get(place, before)
            in_saved = place[1] in saved.get(place[0], ())
            if before is UNKNOWN or in_saved or place in left:
                continue
            self._put_back(placing, place, value, before)

    def _of_signals(self, saved: Saved) -> frozenset[Place]:
        """Of what an earlier run had, the variables that the script's signal handlers set.

        That run got the signal, as to end before its time is over, and this one was started to go on.
        """
        handlers = set_by_handlers() if self._variables.state.of_earlier_run else []
        found = frozenset(
            (path, name)
            for path, values in saved.items()
            for name in values
            if any(self._is_set_by(handler, path, name) for handler in handlers)
        )
        if found:
            lines.say_set_by_handlers(found)
        return found

    def _is_set_by(self, handler: SetByHandler, path: str, name: str) -> bool:
        if path == CELLS:
            cell = dict(self._variables.cells).get(name)
            return cell is not None and any(cell is one for one in handler.cells.values())
        if path in FUNCTIONS:
            frame = self._variables.frame(path)
            return frame is not None and handler.sets_local(frame.f_code, name)
        namespace = self._variables.namespace(path)
        return namespace is not None and handler.sets(namespace.owner, name)

    def _begin_with_first(self) -> None:
        """Values that an earlier process in the place of this one had set are those of the start."""
        if self._first:
            lines.say_given_at_start(self._first)
        self._start |= self._first
        self._first = {}

    def note_made(self, is_new: Callable[[Place], bool]) -> None:
        """Parts of the state were made again, as layers are that come: what is unlike this travels.

        Args:
            is_new: tells whether a place is in them.
        """
        self._variables.look()
        self._variables.keep_paths(lambda path: is_new((path, "")))
        copier = self._copier()
        new = [(place, value) for place, value in self._values() if is_new(place)]
        self._start |= {place: self._now(copier, value) for place, value in new}

    def put(self, saved: Saved) -> None:
        """Put in place what comes with a part of the state. All else stays as it is."""
        places, placing = dict(self._values()), self._placing()
        for path, values in saved.items():
            for name, value in values.items():
                value = value[OF_EPOCH] if isinstance(value, dict) and OF_EPOCH in value else value
                now = places.get((path, name), MISSING)
                if isinstance(value, dict) and UNSAVED in value:
                    self._say_not_taken((path, name), value[UNSAVED])
                elif isinstance(value, dict) and AT_START in value:
                    self._put_back(placing, (path, name), now, self._start.get((path, name), MISSING))
                else:
                    self._put(placing, (path, name), now, value)

    def _put_back(self, placing: Placing, place: Place, value: Any, before: Any) -> None:
        """Give a variable its earlier value, if it has changed."""
        now = self._now(placing.copier(), value)
        if same(now, before):
            return
        if is_object_of_script(now) and same(now, self._at_epoch.get(place, UNKNOWN)):
            return  # the top has made it, and not where this state comes from: each rank may have its own
        if words := _words_of(before) or _words_of(now):
            # Before the first step and at the top of an epoch, the script itself changes it.
            if self._paths_before_steps and not same(now, self._at_epoch.get(place, UNKNOWN)):
                self._say_not_taken(place, words)
        elif not isinstance(before, Trace) and not isinstance(now, Trace):
            self._put(placing, place, value, before)

    def _of_epoch(self, place: Place, there: Any, *, alike: bool) -> Any:
        """A value that is set at the top of an epoch: it may be a rank's own, or made of weights of then."""
        here = self._at_epoch.get(place, UNKNOWN)
        if here is UNKNOWN or place in self.own or same(here, there):
            return here
        if isinstance(there, dict) and UNSAVED in there:
            return here
        if alike:
            return there
        self._unlike_at_top.append(in_words(place))
        return here

    def _made_in_a_step(self, place: Place) -> bool:
        """Whether something that was there before has got this variable in a step, and may lose it again."""
        path, name = place
        if place in self._before_steps or path not in self._paths_before_steps:
            return False
        namespace = self._variables.namespace(path)
        return namespace is not None and namespace.may_lose(name)

    def _is_set(self, place: Place) -> bool:
        """Whether the script has a variable there, whatever is in it."""
        path, name = place
        if path in FUNCTIONS:
            frame = self._variables.frame(path)
            return frame is not None and name in frame.f_locals
        namespace = self._variables.namespace(path)
        return namespace is not None and name in namespace.variables

    def _may_be_given(self, place: Place) -> bool:
        """Whether a variable may be given another of the objects: not where each rank may choose its own."""
        start = self._start.get(place, MISSING)
        return place in self.alike or not (start is None or start is MISSING)

    def _put(self, placing: Placing, place: Place, now: Any, value: Any) -> None:
        path, name = place
        placing.lacks = False
        value = self._object_of(value) if is_object_of_script(value) else placing.put(now, value)
        if value is UNKNOWN or placing.lacks:
            self._say_missing(place)
        if value is UNKNOWN:
            return
        if value is now:
            return
        if path == FLAGS:
            if (parameter := self._variables.state.named_parameters().get(name)) is not None:
                parameter.requires_grad_(value)
        elif path == CELLS:
            cell = next((cell for at, cell in self._variables.cells if at == name), None)
            if cell is not None:
                cell.cell_contents = value
        elif path in FUNCTIONS:
            if (frame := self._variables.frame(path)) is not None:
                set_variables(frame, {name: value})
        elif (namespace := self._variables.namespace(path)) is not None and namespace.takes(name):
            namespace.write(name, value)
        else:
            self._say_missing(place)

    def _object_of(self, value: Mapping[str, str]) -> Any:
        found = self._variables.object_at(value[OBJECT])
        return UNKNOWN if found is None else found

    def _say_missing(self, place: Place) -> None:
        if not self._at_top_of_epoch:  # else the script may make it there
            lines.say_missing(place)

    def _say_not_taken(self, place: Place, words: str) -> None:
        if words and place not in self._named:
            self._named.add(place)
            lines.say_not_taken(place, words)

    def _is_plain(self, value: Any) -> bool:
        """Whether a checkpoint can hold it, and it can be read back."""
        if isinstance(value, Trace):
            return False
        try:
            Encoder(self._variables.state.known).encode(value)
        except NotPlainError:
            return False
        return True

    def _all_now(self) -> dict[Place, Any]:
        copier = self._copier()
        return {place: self._now(copier, value) for place, value in self._values()}

    def _now(self, copier: Copier, value: Any) -> Any:
        """A copy of a value, the path of an object, or a trace where there is neither."""
        if (copied := copier.copy(value)) is not UNKNOWN:
            return copied
        path = self._variables.path_of(value)
        return self._trace(value) if path is None else {OBJECT: path}

    def _trace(self, value: Any) -> Trace:
        return trace_of(value, self._variables.protected.has)

    def _copier(self) -> Copier:
        return Copier(self._variables.protected.has, self._references())

    def _references(self) -> References:
        return References(self._variables.state.named_parameters(), self._variables.state.modules)

    def _placing(self) -> Placing:
        return Placing(self._variables.protected.has, self._references())

    def _values(self) -> Iterator[tuple[Place, Any]]:
        variables = self._variables
        # They say themselves what is their state, not what they hold. A file may have the name of one.
        small = {*map(id, variables.state.small.values())}
        # And a part of an integration says so of some attributes of what it is a part for.
        given = {
            (id(owner), name)
            for part in variables.state.small.values()
            for owner, name in (vars(part) if has_dict(part) else {}).get("gives_attributes", ())
        }
        for namespace, name in variables.slots:
            value = namespace.variables.get(name, MISSING)
            owner = id(namespace.owner)
            by_others = owner in small or (owner, name) in given or NAMELESS in namespace.path
            if not by_others and not is_of_session(value):
                yield (namespace.path, name), value
        for path, cell in variables.cells:
            if NAMELESS not in path:
                yield (CELLS, path), content_of(cell)
        for place, value in variables.of_loop().items():
            if not is_of_session(value):
                yield place, value
        for name, parameter in variables.state.named_parameters().items():
            yield (FLAGS, name), parameter.requires_grad


def _is_of_process(value: Any) -> bool:
    """Whether a value is, or holds, one that each process has for itself."""
    todo, seen = [value], set[int]()
    while todo:
        one = todo.pop()
        if isinstance(one, _OF_PROCESS):
            return True
        if isinstance(one, Mapping | list | tuple | deque) and id(one) not in seen:
            seen.add(id(one))
            todo.extend(one.values() if isinstance(one, Mapping) else one)
    return False


def _words_of(now: Any) -> str:
    return now.words if isinstance(now, Trace) else ""


def _seed_of(generator: Any) -> int:
    """The last seed of a generator; 0 of those that do not tell it."""
    return generator.initial_seed() if isinstance(generator, torch.Generator) else 0
