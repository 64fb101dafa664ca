"""Steps per second, averaged over what a viewer has seen. Pure."""

from collections import deque

from deadpool_run.view.health import Status

_MOST = 60
"""Looks that are averaged: those that saw a newly completed step."""
_LEAST_S = 5.0
"""Over a shorter time, what the run has recorded says more."""


class Pace:
    """The speed of one run. A repair in the time seen counts, as it does for the end of the run."""

    def __init__(self) -> None:
        self.recorded: float | None = None
        """Steps per second according to the run's samples, if the viewer can read them."""
        self._done: int | None = None
        self._seen: deque[tuple[float, int]] = deque(maxlen=_MOST)
        """Times at which new steps were seen, and the steps completed then. The first look is none: its step may be old."""

    def note(self, done: int, at_s: float) -> None:
        """Take the steps completed at a time."""
        if self._seen and done < self._seen[0][1]:  # the world has started again
            self._seen.clear()
        if self._done is not None and done != self._done:
            self._seen.append((at_s, done))
        self._done = done

    def per_s(self) -> float | None:
        """Return the steps per second; None if nothing can be said yet."""
        own = seen_s = 0.0
        if len(self._seen) > 1:
            (began_s, first), (ended_s, last) = self._seen[0], self._seen[-1]
            seen_s = ended_s - began_s
            own = (last - first) / seen_s if seen_s > 0 else 0.0
        if own > 0 and (seen_s >= _LEAST_S or not self.recorded):
            return own
        return self.recorded


def completed(status: Status) -> int:
    """Return the steps that the rank with the most has completed; 0 outside a step loop."""
    ranks = status.get("ranks", ()) if status.get("managed") else ()
    return max((rank.get("step") or 0 for rank in ranks), default=0)
