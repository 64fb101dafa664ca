"""The report of a finished repair."""

from deadpool_run.core.effects import Incident
from deadpool_run.core.state import Repair
from deadpool_run.ids import Epoch

KEPT = 20
"""Incidents that the state remembers."""


def finished(repair: Repair, epoch: Epoch, now: float) -> Incident:
    """Return the incident that ends now, its times in seconds after its first loss was known.

    A phase without members, such as rehearsing where there is no replacement, took no time after the one before it.
    """
    assert repair.resume is not None
    assert all(loss.replacement is not None for loss in repair.losses), "it is over only when every rank is held again"

    def after(at: float | None, otherwise: float) -> float:
        return otherwise if at is None else at - repair.began_at

    aborted, promoted = after(repair.aborted_at, 0.0), after(repair.promoted_at, 0.0)
    restored = after(repair.restored_at, aborted)
    reached = repair.dead_held if repair.completed is None else repair.completed
    return Incident(
        epoch=epoch,
        losses=repair.losses,
        resumed=repair.resume,
        steps_repeated=0 if reached is None else max(0, reached - repair.resume),
        detected_s=repair.detected_s,
        aborted_s=aborted,
        promoted_s=promoted,
        rehearsed_s=after(repair.rehearsed_at, promoted),
        restored_s=restored,
        attached_s=after(repair.attached_at, restored),
        first_step_s=now - repair.began_at,
        reentered=tuple(sorted(repair.reentered)),
        exposed_s=repair.exposed_s,
    )
