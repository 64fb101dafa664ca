"""The tensors of optimizers' state by name, for variables that refer to them.

`load_state_dict()` of an optimizer takes over the tensors that it is given. If a script rolls back to a state that it keeps in a
variable, the optimizer and the variable have the same tensors from then on.
"""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim import Optimizer

from deadpool_run.vault.segments import SlotRole
from deadpool_run.worker.state.optimizers import Tracked


class StateTensors:
    """The present tensors. They are looked up only when a variable has a tensor that it did not have when the loop began."""

    def __init__(self, heavy: Callable[[], Iterable[Tracked]]) -> None:
        """`heavy` yields the parameters and the state of optimizers."""
        self._heavy = heavy
        self._known: dict[str, Tensor] | None = None
        self._names: dict[int, str] = {}

    def watch(self, optimizer: Optimizer) -> None:
        """Look the tensors up again after each `load_state_dict()` of an optimizer."""
        optimizer.register_load_state_dict_post_hook(lambda _: self.forget())

    def forget(self) -> None:
        """Look the tensors up again when one is needed: others may have taken their place."""
        self._known = None

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor of an optimizer's state; None for any other."""
        known = self._look_up()
        name = self._names.get(id(tensor))
        return name if name is not None and known[name] is tensor else None

    def named(self, name: str) -> Tensor:
        """Return the tensor with a name. Raises `KeyError` if no optimizer has it."""
        return self._look_up()[name]

    def _look_up(self) -> dict[str, Tensor]:
        if self._known is None:
            found = (tracked for tracked in self._heavy() if tracked.role is SlotRole.OPTIMIZER)
            self._known = {tracked.name: tracked.tensor for tracked in found}
            self._names = {id(tensor): name for name, tensor in self._known.items()}
        return self._known
