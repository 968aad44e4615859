"""An example training whose worker 0 plans changes to other worlds, again and again until each has come.

Variables: ``EXAMPLE`` is its name; ``CHANGES`` is a list in JSON of ``[iteration, slots, arguments]``: from
which iteration on, which machines the next world has in its slots (by number, those that have a slot now come
first), and arguments that are added to the script's, or degrees (``pp=2,tp=2``). In the folder ``TAKEN``, if
it is given, each worker of another world writes its part of the state with which that began.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator

import swift_ft
from swift_ft.network.command_proof import proof_of_command
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.writer import write_part

CHANGES = json.loads(os.environ["CHANGES"])
PACE_S = 0.2
"""As long as changes are due each step takes so long: the next world's workers start meanwhile."""


class Session(swift_ft.Session):
    def steps(self, iterations: int) -> Iterator[swift_ft.Step]:
        for step in super().steps(iterations):
            if not step.replayed:
                self._keep_taken(step.index)
                self._change(step.index)
            yield step

    def _keep_taken(self, iteration: int) -> None:
        context, state = self._assembly._participant.context, self._assembly._participant.state
        if context.world and "TAKEN" in os.environ and state.worlds.present.begins_at(iteration):
            part = f"world-{context.world}-rank-{context.rank}"
            write_part(Store(os.environ["TAKEN"]), part, self._assembly._state.to_save())

    def _change(self, iteration: int) -> None:
        participant = self._assembly._participant
        state = participant.state
        done = state.layouts.changes
        if done >= len(CHANGES):  # layers that move count, too
            return
        time.sleep(PACE_S)
        at, slots, arguments = CHANGES[done]
        committed = state.checkpoints.committed is not None
        if participant.context.rank or iteration < at or state.worlds.change or not committed:
            return
        if state.phase != Phase.LIVE:
            return
        membership = state.membership
        members = [membership.members[slot] for slot in sorted(membership.members)] + membership.waiting()
        if max(slots) >= len(members):  # after a loss: one that is asked for has not come yet
            return
        command = (*sys.argv, *arguments) if arguments and "=" not in arguments[0] else ()
        context = participant.context
        participant.append(
            ev.ChangePlanned(
                world=state.worlds.planned + 1,
                machines=tuple(members[number] for number in slots),
                command=command,
                proof=proof_of_command(context.secret, context.run_id, command) if command else "",
                plan=arguments[0] if arguments and "=" in arguments[0] else "",
                reason="the test asks for it",
            )
        )


swift_ft.Session = Session  # type: ignore[misc]
importlib.import_module(os.environ.get("EXAMPLE", "train_ddp")).main()
