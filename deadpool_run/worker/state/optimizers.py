"""An optimizer's state: its tensors, its other values, its hyper-parameters and its groups.

An optimizer may have an inner one that updates part of the parameters (ZeroRedundancyOptimizer). Then the inner one has the
state, and the outer one the groups. A wrapper (PostLocalSGDOptimizer, Lookahead) steps another optimizer and does more; its own
state is in its attributes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from deadpool_run.errors import SnapshotError
from deadpool_run.vault.segments import SlotRole
from deadpool_run.worker.codec import copied, is_simple, table_of
from deadpool_run.worker.compat.wrapper_tensors import form_of, is_composed, parts_of

_OF_SCALERS = ("grad_scale", "found_inf")
"""Attributes that `GradScaler.step` sets during a fused optimizer's step."""
_LAST_TABLE = "_optimizer_load_state_dict_post_hooks"
"""An attribute that `Optimizer.__init__` sets. Some wrappers set those of hooks of `step()` themselves."""
NO_PLAIN: dict[str, Any] = {"state": {}, "shared": {}, "forms": {}}
"""`OptimizerState.plain` of an optimizer that keeps only plain tensors."""


def is_optimizer_wrapper(obj: object) -> bool:
    """Return whether an object has an optimizer's interface, but has never been initialized as one."""
    return isinstance(obj, Optimizer) and _LAST_TABLE not in vars(obj)


def wrapped(obj: Optimizer) -> list[Optimizer]:
    """Return the optimizers that a wrapper steps; of any other optimizer, this one."""
    if not is_optimizer_wrapper(obj):
        return [obj]
    inner = {id(each): each for each in vars(obj).values() if isinstance(each, Optimizer) and each is not obj}
    return [found for each in inner.values() for found in wrapped(each)]


@dataclass(frozen=True, slots=True)
class Tracked:
    """A live tensor of a snapshot."""

    name: str
    role: SlotRole
    tensor: Tensor


class OptimizerState:
    """The state and the hyper-parameters of an optimizer."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer
        self.keeper = _keeper(optimizer)
        """The optimizer that holds the state of the parameters; usually the same."""
        self._scales = {name for name in _OF_SCALERS if hasattr(optimizer, name)}

    @property
    def state(self) -> dict[Any, Any]:
        """The state by parameter. Despite the annotation, some optimizers keep shared values under other keys."""
        return cast("dict[Any, Any]", self.keeper.state)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, with its name for when no module has it."""
        for number, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield f"{self.name}/{number}.{index}", parameter

    def fingerprint(self, *, plain: bool) -> list[int]:
        """Return the identities of the parameters and of the state's values. With `plain`, 0 for a value that is no tensor.

        `plain` is whether some value is not a plain tensor.
        """
        found: list[int] = []
        for group in self.optimizer.param_groups:
            found += map(id, group["params"])
        for state in self.state.values():
            if not plain and type(state) is dict:  # the usual case, and this runs at the end of each step
                found += map(id, state.values())
            elif type(state) is dict:
                found += [id(value) if isinstance(value, Tensor) else 0 for value in state.values()]
                found += [id(part) for value in state.values() if is_composed(value) for _, part in parts_of(value)]
        return found

    def has_plain(self) -> bool:
        """Return whether some of the state is not a plain tensor with its own name."""
        return any(
            not isinstance(parameter, Tensor)
            or any(is_composed(value) or not _is_heavy(key, value) for key, value in state.items())
            for parameter, state in self.state.items()
        )

    def tensors(self, names: dict[int, str]) -> Iterator[tuple[Tensor, str, Tracked]]:
        """Yield parameter, key and tensor for each tensor of the state; `names` are parameters' names by identity.

        Of a tensor that consists of others, these are yielded.
        """
        for parameter, state in self.state.items():
            if isinstance(parameter, Tensor) and id(parameter) in names:
                for key, value in state.items():
                    if not _is_heavy(key, value):
                        continue
                    name = f"{self.name}/{names[id(parameter)]}/{key}"
                    parts = (
                        [(f".{path}", part) for path, part in parts_of(value)] if is_composed(value) else [("", value)]
                    )
                    for path, part in parts:
                        yield parameter, key, Tracked(name + path, SlotRole.OPTIMIZER, part)

    def plain(self, names: dict[int, str]) -> dict[str, Any]:
        """Return the state that `tensors` does not yield, with the script's own objects in it."""
        found: dict[str, Any] = {"state": {}, "shared": {}, "forms": {}}
        for parameter, state in self.state.items():
            if not isinstance(parameter, Tensor):
                found["shared"][str(parameter)] = state
            elif id(parameter) in names:
                name = names[id(parameter)]
                found["state"][name] = {k: v for k, v in state.items() if not _is_heavy(k, v)}
                if forms := {k: form_of(v) for k, v in state.items() if _is_heavy(k, v) and is_composed(v)}:
                    found["forms"][name] = forms
        return found

    def put_plain(self, values: dict[str, Any], names: dict[int, str]) -> None:
        """Set the values of `plain()` except the forms, and remove all other values that are not tensors."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                rest = values["state"].get(names[id(parameter)])
                state = self.state.get(parameter, {})
                live = {key: state.pop(key) for key in [k for k, v in state.items() if not _is_heavy(k, v)]}
                if rest is not None:
                    self.state[parameter].update((key, _put_into(live.get(key), value)) for key, value in rest.items())
                elif not state:
                    self.state.pop(parameter, None)
        for key, shared in values["shared"].items():
            self.state[key] = shared

    def members(self) -> list[list[Tensor]]:
        """Return the parameters of each group; a script may add groups as it trains."""
        return [list(group["params"]) for group in self.optimizer.param_groups]

    def put_members(self, members: list[list[Tensor]]) -> None:
        """Make groups of these parameters, in this order: drop later groups and parameters with their state, add missing ones.

        `put` sets the hyper-parameters of added groups. Raises `SnapshotError` if the optimizer distributes its parameters
        over the ranks, which cannot be undone.
        """
        live = self.members()
        if [list(map(id, group)) for group in live] == [list(map(id, group)) for group in members]:
            return
        if self.keeper is not self.optimizer:
            kind = type(self.optimizer).__qualname__
            raise SnapshotError(
                f"the groups of {self.name!r} were changed during training, and a {kind} cannot undo that.\n"
                "Pass all parameters when it is created."
            )
        groups = self.optimizer.param_groups
        del groups[len(members) :]
        for parameters, group in zip(members, groups, strict=False):
            if isinstance(group["params"], list):
                group["params"][:] = parameters  # in place: `LBFGS` has a reference
            else:  # a script has put a tuple there
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
        memo: dict[int, Any] = {}
        return [
            {key: copied(value, memo) for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]

    def put(self, groups: list[dict[str, Any]]) -> None:
        """Set the hyper-parameters; a tensor is set in place, because schedulers and graphs refer to it.

        Removes the attributes that a GradScaler set in an interrupted step: the next step would be scaled twice.
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


def _put_into(live: Any, value: Any) -> Any:
    """Return the live object with the attributes of a restored one: a script may refer to it. Any other value is returned as it is."""
    if type(live) is not type(value) or not is_simple(type(value)):
        return value
    table_of(live).clear()
    table_of(live).update(table_of(value))
    return live


def _is_heavy(key: object, value: object) -> bool:
    return type(key) is str and "/" not in key and isinstance(value, Tensor)


def _keeper(optimizer: Optimizer) -> Optimizer:
    """Return the inner optimizer that keeps the state, or the optimizer itself."""
    inner = vars(optimizer).get("optim")
    return inner if isinstance(inner, Optimizer) and inner.state is not optimizer.state else optimizer
