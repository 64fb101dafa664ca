"""The lines that report a repair to the user: a short one, and one with all phases; and its fields for programs. Pure."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from deadpool_run.core.effects import PHASES, Incident, Loss
from deadpool_run.text import counted

PARTS = tuple(name.replace("_", " ") for name in PHASES)
"""The parts of a repair, in words."""


def incident_line(incident: Incident) -> str:
    """Return the failed and the new worker, the milliseconds of each part, and the steps repeated.

    Parts overlap, as a replacement rehearses while survivors abort their steps. Each is shown with what it adds to the total.
    """
    times = dict(parts_of(incident))
    if incident.detected_s is None:
        del times["detected"]
    first, *others = (f"{name} {_ms(seconds)}" for name, seconds in times.items())
    return (
        f"{'; '.join(_loss(loss) for loss in incident.losses)}: {first} ms, {', '.join(others)}, "
        f"total {_ms(sum(times.values()))} ms; {_resumed(incident)}"
    )


def parts_of(incident: Incident) -> Iterator[tuple[str, float]]:
    """Yield the parts of a repair, each with the seconds that it adds to the total."""
    yield PARTS[0], incident.detected_s or 0.0
    reached_s = 0.0
    for part, name in zip(PARTS[1:], PHASES[1:], strict=True):
        after_s: float = getattr(incident, f"{name}_s")
        yield part, max(0.0, after_s - reached_s)
        reached_s = max(reached_s, after_s)


def short_line(incident: Incident) -> str:
    """Return the ranks, where they run now, the time of the repair or of the move, and the steps repeated."""
    times, last = Counter(loss.rank for loss in incident.losses), {loss.rank: loss for loss in incident.losses}
    where = "to" if incident.planned else "on"
    losses = " and ".join(
        f"rank {rank}{' (injected)' if loss.injected else ''}{f', lost {times[rank]} times,' if times[rank] > 1 else ''} "
        f"{where} {_replacement(loss)}"
        for rank, loss in last.items()
    )
    if incident.planned:
        return f"moved {losses} in {incident.first_step_s:.2f} s, after step {incident.resumed}; no step repeated"
    return f"recovered {losses} in {total_s(incident):.2f} s; {_resumed(incident)}"


def total_s(incident: Incident) -> float:
    """Return the time from the fault, if it was injected, else from when the loss was known, to the first step of all ranks."""
    return (incident.detected_s or 0.0) + incident.first_step_s


def incident_fields(incident: Incident) -> dict[str, Any]:
    """Return the fields of a line for programs."""
    return {
        "ranks": [loss.rank for loss in incident.losses],
        "causes": [loss.cause for loss in incident.losses],
        "injected": any(loss.injected for loss in incident.losses),
        "planned": incident.planned,
        "resumed": incident.resumed,
        "steps_repeated": incident.steps_repeated,
        "total_s": total_s(incident),
    }


def _loss(loss: Loss) -> str:
    injected = ", injected" if loss.injected else ""
    return f"rank {loss.rank} ({loss.cause}{injected}) goes from worker {loss.worker} to {_replacement(loss)}"


def _replacement(loss: Loss) -> str:
    return f"{'spare' if loss.from_spare else 'fresh'} worker {loss.replacement}"


def _resumed(incident: Incident) -> str:
    return f"resumed at step {incident.resumed}, {counted(incident.steps_repeated, 'step')} repeated"


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))
