"""The parameters, and the tensors of optimizers' state, by name, for variables that refer to them.

`load_state_dict()` of an optimizer takes over the tensors that it is given. If a script rolls back to a state that it keeps in a
variable, the optimizer and the variable have the same tensors from then on. So have a module and a variable from which a step takes
a new parameter.
"""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim import Optimizer

from deadpool_run.worker.compat.modules import address_of
from deadpool_run.worker.state.optimizers import Tracked


class StateTensors:
    """The present tensors. They are looked up only when a variable has a tensor that it did not have when the loop began."""

    def __init__(self, heavy: Callable[[], Iterable[Tracked]]) -> None:
        """`heavy` yields the parameters and the state of optimizers."""
        self._heavy = heavy
        self._known: dict[str, Tensor] | None = None
        self._names: dict[int, str] = {}
        self._by_address: dict[int, Tensor] = {}

    def watch(self, optimizer: Optimizer) -> None:
        """Look the tensors up again after each `load_state_dict()` of an optimizer."""
        optimizer.register_load_state_dict_post_hook(lambda _: self.forget())

    def forget(self) -> None:
        """Look the tensors up again when one is needed: others may have taken their place."""
        self._known = None

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter or a tensor of an optimizer's state; None for any other."""
        known = self._look_up()
        name = self._names.get(id(tensor))
        return name if name is not None and known[name] is tensor else None

    def has_memory_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares the memory of a parameter or of one of an optimizer's state, and is another one."""
        self._look_up()
        address = address_of(tensor)
        return bool(address) and address_of(self._by_address.get(address)) == address

    def named(self, name: str) -> Tensor:
        """Return the tensor with a name. Raises `KeyError` if there is none."""
        return self._look_up()[name]

    def _look_up(self) -> dict[str, Tensor]:
        if self._known is None:
            self._known = {tracked.name: tracked.tensor for tracked in self._heavy()}
            self._names = {id(tensor): name for name, tensor in self._known.items()}
            self._by_address = {address_of(tensor): tensor for tensor in self._known.values()}
        return self._known
