"""The kinds of faults as `kill-rank --how` and `--chaos` write them. Pure."""

from deadpool_run.core.injection import SLOWNESS_LIMITS, KillHow, Slowness, is_possible

SLOW = "slow:"
KINDS = (*KillHow, f"{SLOW}F")
SLOW_S = 60.0
"""How long a rank is slowed unless something else is asked for."""


def fault_kind(text: str, slow_for_s: float) -> KillHow | Slowness | str:
    """Return the kind of fault, or a text that says what is wrong, and on its last line what to write."""
    if text in list(KillHow):
        return KillHow(text)
    if not text.startswith(SLOW):
        return f"no way to fail\nwrite one of {', '.join(KINDS)}"
    try:
        slowness = Slowness(float(text.removeprefix(SLOW)), slow_for_s)
    except ValueError:
        return "not a factor\nwrite for example slow:3"
    if not is_possible(slowness):
        return f"{SLOWNESS_LIMITS}\nwrite for example slow:3"
    return slowness
