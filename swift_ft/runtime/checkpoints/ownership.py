"""Sees whether the store still is this run's, before anything in it is changed for all workers."""

from __future__ import annotations

from swift_ft.checkpoint.run_record import owner_of
from swift_ft.coordination.participant import Participant
from swift_ft.errors import StoreInUseError
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause
from swift_ft.storage.store import Store


def end_if_taken_over(store: Store, participant: Participant) -> None:
    """End the job if another run has claimed the store since: both would write over what the other has saved.

    Raises:
        StoreInUseError: one has.
        Exception: what the store's client raised.
    """
    owner = owner_of(store)
    if owner in ("", participant.context.run_id):
        return
    reason = (
        f"run {owner} has taken over {store.url}, so run {participant.context.run_id} ends here: two runs "
        "cannot share a store. End the other one before --resume, --auto-resume or --fresh"
    )
    participant.append(ev.JobClosed(reason=reason, cause=Cause.STORE))
    raise StoreInUseError(reason, path=store.url)
