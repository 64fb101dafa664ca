"""Private names of torch's `GradScaler`: its state without a wait for the device, and the steps in which it skips an update."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler


def state_of(obj: Any) -> Any:
    """Return an object's `state_dict()`. That of a scaler has tensors for the numbers that it keeps on the device.

    `GradScaler.state_dict()` reads them with `item()`, which waits for the device.
    """
    if not _has_torchs_state(obj) or not obj.is_enabled():
        return obj.state_dict()
    scale, tracker = obj._scale, obj._growth_tracker  # noqa: SLF001
    if scale is None or tracker is None:  # before its first use
        return obj.state_dict()
    return {
        "scale": scale,
        "growth_factor": obj.get_growth_factor(),
        "backoff_factor": obj.get_backoff_factor(),
        "growth_interval": obj.get_growth_interval(),
        "_growth_tracker": tracker,
    }


def _has_torchs_state(obj: Any) -> bool:
    kind, own = type(obj), GradScaler
    return issubclass(kind, own) and kind.state_dict is own.state_dict and kind.load_state_dict is own.load_state_dict


def load_state(obj: Any, state: Any) -> None:
    """Load what `state_of` has returned."""
    if _has_torchs_state(obj):
        state = {name: value.item() if isinstance(value, Tensor) else value for name, value in state.items()}
    obj.load_state_dict(state)


def forget_unscaled(scaler: GradScaler) -> None:
    """Reset the scaler's notes on unscaled optimizers; a disabled scaler has none."""
    getattr(scaler, "_per_optimizer_states", {}).clear()


def watch_steps(ended: Callable[[], None]) -> Callable[[], None]:
    """Call `ended` at the end of each `step()` of a scaler, which may have skipped the update. Return a function that ends this."""
    plain = GradScaler.step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        ended()
        return result

    def end() -> None:
        if GradScaler.step is step:  # the script has put nothing on top
            GradScaler.step = plain  # type: ignore[method-assign]

    GradScaler.step = step  # type: ignore[method-assign]
    return end
