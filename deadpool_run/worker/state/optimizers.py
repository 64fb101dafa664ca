"""What an optimizer keeps: its state tensors, what else it keeps, its hyper-parameters, and whose they are.

Of an optimizer that has another one do the work on a part of the parameters (ZeroRedundancyOptimizer), the state is the
other one's, and the groups are its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from deadpool_run.errors import SnapshotError
from deadpool_run.vault.segments import SlotRole
from deadpool_run.worker.codec import copied

_UNNAMED = "param_names"
_OF_SCALERS = ("grad_scale", "found_inf")
"""Attributes that `GradScaler.step` sets for a fused optimizer's step, and removes after it."""
NO_PLAIN: dict[str, Any] = {"state": {}, "shared": {}}
"""What `OptimizerState.plain` returns of an optimizer that keeps tensors only."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """A live tensor that belongs into a snapshot."""

    name: str
    role: SlotRole
    tensor: Tensor


class OptimizerState:
    """The state and the hyper-parameters of an optimizer."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer
        self.keeper = _keeper(optimizer)
        """The optimizer whose `state` is that of the parameters; mostly the same."""
        self._scales = {name for name in _OF_SCALERS if hasattr(optimizer, name)}

    @property
    def state(self) -> dict[Any, Any]:
        """The state by parameter; some optimizers keep shared values under other keys, whatever the annotation says."""
        return cast("dict[Any, Any]", self.keeper.state)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter with the name that it has if no module knows it."""
        for number, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield f"{self.name}/{number}.{index}", parameter

    def fingerprint(self, *, plain: bool) -> list[int]:
        """Return the identities of the parameters and of the state's values.

        With `plain` some values are not tensors; those count as one, whatever they are.
        """
        found: list[int] = []
        for group in self.optimizer.param_groups:
            found += map(id, group["params"])
        for state in self.state.values():
            if not plain and type(state) is dict:  # the usual case, and this runs at the end of each step
                found += map(id, state.values())
            elif type(state) is dict:
                found += [id(value) if isinstance(value, Tensor) else 0 for value in state.values()]
        return found

    def has_plain(self) -> bool:
        """Say whether some of the state is not a tensor under a name of its own."""
        return any(
            not isinstance(parameter, Tensor) or not all(_is_heavy(key, value) for key, value in state.items())
            for parameter, state in self.state.items()
        )

    def tensors(self, names: dict[int, str]) -> Iterator[Tracked]:
        """Yield the tensors of the state; `names` gives the name of a parameter by its identity."""
        return (tracked for _, tracked in self.tensors_of(names))

    def tensors_of(self, names: dict[int, str]) -> Iterator[tuple[Tensor, Tracked]]:
        """Yield the tensors of the state, each with its parameter."""
        for parameter, state in self.state.items():
            if isinstance(parameter, Tensor) and id(parameter) in names:
                for key, value in state.items():
                    if _is_heavy(key, value):
                        yield parameter, Tracked(f"{self.name}/{names[id(parameter)]}/{key}", SlotRole.OPTIMIZER, value)

    def plain(self, names: dict[int, str]) -> dict[str, Any]:
        """Return what `tensors` does not yield; like the tensors it changes only inside `optimizer.step()`."""
        found: dict[str, Any] = {"state": {}, "shared": {}}
        for parameter, state in self.state.items():
            if not isinstance(parameter, Tensor):
                found["shared"][str(parameter)] = state
            elif id(parameter) in names:
                found["state"][names[id(parameter)]] = {k: v for k, v in state.items() if not _is_heavy(k, v)}
        return found

    def put_plain(self, values: dict[str, Any], names: dict[int, str]) -> None:
        """Make the state hold the values of `plain()` and no others beside its tensors, which are the caller's."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                rest = values["state"].get(names[id(parameter)])
                state = self.state.get(parameter, {})
                for key in [k for k, v in state.items() if not _is_heavy(k, v)]:
                    del state[key]
                if rest is not None:
                    self.state[parameter].update(rest)
                elif not state:
                    self.state.pop(parameter, None)
        for key, shared in values["shared"].items():
            self.state[key] = shared

    def members(self) -> list[list[Tensor]]:
        """Return the parameters of each group; a script may add groups as it trains."""
        return [list(group["params"]) for group in self.optimizer.param_groups]

    def put_members(self, members: list[list[Tensor]]) -> None:
        """Make the groups those with these parameters: drop what came later, add what is missing.

        What is dropped loses its state; the hyper-parameters of what is added are the caller's, by `put`.
        Raises `SnapshotError` if the optimizer shares its parameters out over the ranks, which cannot be undone.
        """
        live = self.members()
        if [list(map(id, group)) for group in live] == [list(map(id, group)) for group in members]:
            return
        if self.keeper is not self.optimizer:
            kind = type(self.optimizer).__qualname__
            raise SnapshotError(
                f"the groups of {self.name!r} were changed during training, and a {kind} cannot take that back.\n"
                "Give it all its parameters when it is made."
            )
        groups = self.optimizer.param_groups
        del groups[len(members) :]
        for parameters, group in zip(members, groups, strict=False):
            group["params"] = list(parameters)
        kept = {id(parameter) for parameters in members for parameter in parameters}
        for parameters in live:
            for parameter in parameters:
                if id(parameter) not in kept:
                    self.state.pop(parameter, None)
        for parameters in members[len(groups) :]:
            self.optimizer.add_param_group({"params": list(parameters)})

    def take(self) -> list[dict[str, Any]]:
        """Return a copy of the hyper-parameters of each group."""
        return [
            {key: copied(value) for key, value in group.items() if key not in ("params", _UNNAMED)}
            for group in self.optimizer.param_groups
        ]

    def put(self, groups: list[dict[str, Any]]) -> None:
        """Set the hyper-parameters; one that is a tensor is set in place, since schedulers and graphs refer to it.

        What a GradScaler lent to a step that was cut is dropped: the next step would be scaled twice.
        """
        for name in _OF_SCALERS:
            if name not in self._scales and hasattr(self.optimizer, name):
                delattr(self.optimizer, name)
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in values.items():
                live = group.get(key)
                if isinstance(live, Tensor) and isinstance(value, Tensor) and live.shape == value.shape:
                    live.copy_(value)
                else:
                    group[key] = copied(value)


def _is_heavy(key: object, value: object) -> bool:
    """Say whether a value of an optimizer's state is copied as a tensor under a name of its own."""
    return type(key) is str and "/" not in key and isinstance(value, Tensor)


def _keeper(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that does the work of another one and keeps its state; most do it themselves."""
    inner = vars(optimizer).get("optim")
    return inner if isinstance(inner, Optimizer) and inner.state is not optimizer.state else optimizer
