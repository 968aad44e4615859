"""The proof that workers hold what they should hold, at each checkpoint boundary.

    replicas          the first worker publishes its digests; all others compare theirs with these
    a rebuilt worker  compares its own with those of the worker that it replaces, where that one had saved

Training does not wait for the comparison of replicas. A part counts only once it is done.

Digests are of parameters and optimizer state (`checkpoint/state_digest.py`). Buffers are left out, as each
replica may have its own. What is loaded or received is compared with what was saved or sent when it arrives.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial

from swift_ft.checkpoint.layered_state import LayeredState
from swift_ft.checkpoint.state_digest import StateDigests, differing, listed, tensor_digests
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config import store_keys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.coordination.participant import Participant
from swift_ft.determinism import UNLIKE_RESULT
from swift_ft.errors import DivergenceError
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.job_state import State
from swift_ft.recovery.topology import checkpoint_owner
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore


class Verify(StrEnum):
    """The choice of whether the training state is compared with what it should be."""

    DIGEST = "digest"
    """At each checkpoint boundary, and wherever state is loaded or received."""
    REPLAY = "replay"
    """The same, and each so many iterations one is computed twice (`verify/part.py`)."""
    NONE = "none"
    """Never."""


class StateProof:
    """One worker's digests, and what they are compared with.

    Args:
        state: what the session protects.
        participant: this worker's part in the job.
        rendezvous: where digests are published.
        writer: publishes and compares them.
        verify: whether anything is compared at all.

    Attributes:
        on: whether anything is compared.
        failed: this worker's state differs from a replica's. The job ends.
    """

    def __init__(
        self,
        state: TrainingState,
        participant: Participant,
        rendezvous: RendezvousStore,
        writer: BackgroundWriter,
        verify: Verify,
    ) -> None:
        self._state = state
        self._participant = participant
        self._rendezvous = rendezvous
        self._writer = writer
        self._rank = participant.context.rank
        self.on = verify != Verify.NONE
        self._for_successor: set[int] = set()  # iterations whose digests a replacement would find
        # Owner of these two: the writer's thread. The first is read by others.
        self.failed = False
        self._published: list[str] = []
        self._why_apart: Callable[[Sequence[str]], str | None] = lambda _: None

    def explain_by(self, why_apart: Callable[[Sequence[str]], str | None]) -> None:
        """Ask this function why replicas differ in tensors of some names. Called in the writer's thread."""
        self._why_apart = why_apart

    def digests(self) -> StateDigests | None:
        """Of the present state; None if nothing is verified."""
        return tensor_digests(self._state.named_tensors()) if self.on else None

    def check(
        self, digests: StateDigests | None, iteration: int, generation: int, *, replaying: bool, exact: bool
    ) -> None:
        """Compare the state at a checkpoint boundary. Called by each worker, before it saves its part.

        With replicas it is compared in the background, before whatever is put into the writer afterwards. If
        they differ the job ends: which of them is right cannot be known.

        Args:
            iteration: completed iterations.
            generation: in which they were completed.
            replaying: the worker is being rebuilt.
            exact: the rebuilt state should be that of the lost worker to the bit.

        Raises:
            DivergenceError: if the state is not that of the worker that is being rebuilt.
        """
        if digests is None:
            return
        state = self._participant.state
        if replaying and exact:
            self._compare_with_predecessor(state, digests, iteration)
        self._publish_for_successor(state, digests, iteration)
        self._writer.do(partial(self._compare_with_replicas, state, digests, iteration, generation))

    def _publish_for_successor(self, state: State, digests: StateDigests, iteration: int) -> None:
        """One record for each boundary that a replay may pass: the lost worker may have passed several."""
        committed = state.checkpoints.committed or 0
        for old in {saved for saved in self._for_successor if saved <= committed}:
            self._writer.delete(store_keys.saved_digests(self._rank, old))
            self._for_successor.remove(old)
        record = {"epoch": state.checkpoints.epoch, "digests": _to_text(digests)}
        self._writer.set(store_keys.saved_digests(self._rank, iteration), json.dumps(record))
        self._for_successor.add(iteration)

    def _compare_with_predecessor(self, state: State, digests: StateDigests, iteration: int) -> None:
        key = store_keys.saved_digests(self._rank, iteration)
        if not self._rendezvous.check([key]) or (iteration, self._rank) in state.checkpoints.revoked:
            return
        record = json.loads(self._rendezvous.get(key))
        if record["epoch"] != state.checkpoints.epoch:
            return
        if names := differing(digests, _from_text(record["digests"], digests)):
            raise DivergenceError(
                f"The rebuilt state of worker {self._rank} after iteration {iteration - 1} is not what the "
                f"lost worker had saved: {listed(names)} differ. {UNLIKE_RESULT}.",
                computed_in=iteration - 1,
            )

    def _compare_with_replicas(
        self, state: State, digests: StateDigests, iteration: int, generation: int
    ) -> None:
        statuses = state.round.statuses
        owner = checkpoint_owner(self._rank, statuses)
        holds = statuses[self._rank].holds if self._rank in statuses else ()
        by_layer = LayeredState(self._state).pipelines > 1
        if not holds or (not by_layer and sum(s.holds == holds for s in statuses.values()) < 2):
            return
        key_of = partial(store_keys.replica_digests, state.checkpoints.epoch, generation, iteration)
        published, self._published = self._published, []
        for part, of_part in self._in_parts(digests, owner).items():
            if not self._compare_part(key_of(part), of_part, iteration):
                self.failed = True
                return
        for key in published:
            if not key.startswith(key_of("")):
                self._rendezvous.delete_key(key)

    def _in_parts(self, digests: StateDigests, owner: int) -> dict[str, StateDigests]:
        """The digests to compare at once: a worker's whole state, or one layer's where cuts may differ."""
        layered = LayeredState(self._state)
        if layered.pipelines < 2:
            return {str(owner): digests}
        found: dict[str, dict[str, int]] = {}
        for name, digest in digests.items():
            layer = layered.layer_at(name.rpartition(" of ")[2])
            # What is in no layer may be another thing in each stage.
            key = f"rest of stage {layered.stage}" if layer is None else f"layer {layer}"
            found.setdefault(key, {})[name] = digest
        return dict(found)

    def _compare_part(self, key: str, digests: StateDigests, iteration: int) -> bool:
        """The first replica publishes its digests; the others compare theirs with these."""
        mine = json.dumps({"rank": self._rank, "digests": _to_text(digests)})
        first = json.loads(self._rendezvous.compare_set(key, "", mine))
        if first["rank"] == self._rank:
            self._published.append(key)
            return True
        if not (names := differing(digests, _from_text(first["digests"], digests))):
            return True
        why = self._why_apart(names) or (
            "Which of them is right cannot be known: resume from the last checkpoint. Either the script "
            "changes them on each replica by itself, or the memory of one of the machines is at fault"
        )
        self._participant.append(
            ev.JobClosed(
                reason=f"replicas differ after iteration {iteration - 1}: worker {self._rank} and worker "
                f"{first['rank']} hold different values of {listed(names)}. {why}. "
                '(Session(verify="none") is for replicas that are meant to differ.)',
                cause=Cause.MACHINE,
            )
        )
        return False


def _to_text(digests: StateDigests) -> str:
    """Digests in the order of their names, which are the same on all replicas."""
    return base64.b64encode(array("Q", [digests[name] for name in sorted(digests)]).tobytes()).decode()


def _from_text(text: str, like: StateDigests) -> StateDigests:
    """Digests by the names of others; nothing in common if there are more or fewer."""
    values = array("Q", base64.b64decode(text))
    return dict(zip(sorted(like), values, strict=True)) if len(values) == len(like) else {}
