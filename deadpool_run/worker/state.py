"""What a script protects: where its tensors are, and how its small values are taken and put back.

Parameters and optimizer state change only inside `optimizer.step()`; everything else may change at any time. References
to parameters are taken once, when the module is protected: FSDP2 swaps what `named_parameters()` shows as it gathers
and frees shards, but the sharded parameters themselves stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from deadpool_run.errors import ScriptError
from deadpool_run.vault.segments import Role
from deadpool_run.worker.trees import copied

_EXTRA = nn.Module.get_extra_state
_UNNAMED = "param_names"
NO_PLAIN: dict[str, Any] = {"state": {}, "shared": {}}
"""What `OptimizerState.plain` returns of an optimizer that keeps tensors only."""


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of `tensor`: of a DTensor its shard, of any other itself."""
    # Not to_local(): for a parameter that makes a new view on each call, so that its identity would say nothing.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class Tracked:
    """A live tensor that belongs into a snapshot."""

    name: str
    role: Role
    tensor: Tensor


class ModuleState:
    """The parameters (by reference), buffers and extra state of a module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        root = unwrapped(module)
        self.name = name
        self._modules = list(root.named_modules())
        self.reshard()  # after an evaluation the root shows gathered parameters, which are not the optimizer's
        self.parameters = [(f"{name}/{path}", parameter) for path, parameter in root.named_parameters()]
        self._plain = [parameter for _, parameter in self.parameters if not isinstance(parameter, DTensor)]
        self._sharded = [parameter for _, parameter in self.parameters if isinstance(parameter, DTensor)]
        self.replicated = [child for child in module.modules() if isinstance(child, DistributedDataParallel)]
        self._extra = [(path, child) for path, child in self._modules if type(child).get_extra_state is not _EXTRA]

    def fingerprint(self) -> list[int]:
        """Return the places of the parameters in memory; of shards the identities, since FSDP2 makes new ones."""
        places = [parameter.data_ptr() for parameter in self._plain]
        return places + [id(local(parameter)) for parameter in self._sharded]

    def buffer_values(self) -> list[Tensor]:
        """Return the buffers of this moment, non-persistent ones too, in the order of `buffers()`."""
        return [
            buffer
            for _, child in self._modules
            for buffer in child._buffers.values()  # noqa: SLF001 - buffers() would walk the tree again on each step
            if buffer is not None
        ]

    def buffers(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield name, owner and key of each buffer."""
        for path, child in self._modules:
            for key, buffer in child._buffers.items():  # noqa: SLF001 - as above
                if buffer is not None:
                    yield f"{self.name}/{path}.{key}" if path else f"{self.name}/{key}", child, key

    def take(self) -> dict[str, Any]:
        """Return a copy of the extra state of those children that have one, and what DDP notes of its last forward."""
        extra = {path: copied(child.get_extra_state()) for path, child in self._extra}
        # Whether the next forward begins by broadcasting the buffers: ranks that differ in it would hang.
        return {"extra": extra, "synchronizes": [ddp.require_forward_param_sync for ddp in self.replicated]}

    def put(self, values: dict[str, Any]) -> None:
        """Set what `take` returned."""
        for path, child in self._extra:
            child.set_extra_state(copied(values["extra"][path]))
        for ddp, synchronizes in zip(self.replicated, values["synchronizes"], strict=True):
            ddp.require_forward_param_sync = synchronizes

    def shape(self) -> tuple[frozenset[str], int]:
        """Return what must be the same of two modules for `put` to take what the other's `take` returned."""
        return frozenset(path for path, _ in self._extra), len(self.replicated)

    def reshard(self) -> None:
        """Free what FSDP2 keeps gathered, so that the next forward gathers anew, and does so on every rank."""
        for _, child in self._modules:
            if isinstance(child, FSDPModule):
                child.reshard()


class OptimizerState:
    """The state and the hyper-parameters of an optimizer."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer

    @property
    def _state(self) -> dict[Any, Any]:
        """The state by parameter; some optimizers keep shared values under other keys, whatever the annotation says."""
        return cast("dict[Any, Any]", self.optimizer.state)

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
        for state in self._state.values():
            if not plain and type(state) is dict:  # the usual case, and this runs at the end of each step
                found += map(id, state.values())
            elif type(state) is dict:
                found += [id(value) if isinstance(value, Tensor) else 0 for value in state.values()]
        return found

    def has_plain(self) -> bool:
        """Say whether some of the state is not a tensor under a name of its own."""
        return any(
            not isinstance(parameter, Tensor) or not all(_is_heavy(key, value) for key, value in state.items())
            for parameter, state in self._state.items()
        )

    def tensors(self, names: dict[int, str]) -> Iterator[Tracked]:
        """Yield the tensors of the state; `names` gives the name of a parameter by its identity."""
        for parameter, state in self._state.items():
            if isinstance(parameter, Tensor) and id(parameter) in names:
                for key, value in state.items():
                    if _is_heavy(key, value):
                        yield Tracked(f"{self.name}/{names[id(parameter)]}/{key}", Role.OPTIMIZER, value)

    def plain(self, names: dict[int, str]) -> dict[str, Any]:
        """Return what `tensors` does not yield; like the tensors it changes only inside `optimizer.step()`."""
        found: dict[str, Any] = {"state": {}, "shared": {}}
        for parameter, state in self._state.items():
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
                state = self._state.get(parameter, {})
                for key in [k for k, v in state.items() if not _is_heavy(k, v)]:
                    del state[key]
                if rest is not None:
                    self._state[parameter].update(rest)
                elif not state:
                    self._state.pop(parameter, None)
        for key, shared in values["shared"].items():
            self._state[key] = shared

    def take(self) -> list[dict[str, Any]]:
        """Return a copy of the hyper-parameters of each group."""
        return [
            {key: copied(value) for key, value in group.items() if key not in ("params", _UNNAMED)}
            for group in self.optimizer.param_groups
        ]

    def put(self, groups: list[dict[str, Any]]) -> None:
        """Set the hyper-parameters; one that is a tensor is set in place, since schedulers and graphs refer to it."""
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in values.items():
                live = group.get(key)
                if isinstance(live, Tensor) and isinstance(value, Tensor) and live.shape == value.shape:
                    live.copy_(value)
                else:
                    group[key] = copied(value)


class Protected:
    """Everything that the script protects, by the name that it gave."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleState] = {}
        self.optimizers: dict[str, OptimizerState] = {}
        self.objects: dict[str, Any] = {}

    def add(self, name: str, obj: object) -> None:
        """Protect `obj`. Raises `ScriptError` for what has no state that could be taken, and for a name used twice."""
        if name in self.modules or name in self.optimizers or name in self.objects:
            raise ScriptError(f"{name!r} is protected already.\nGive each object a name of its own.")
        if isinstance(obj, nn.Module):
            self.modules[name] = ModuleState(name, obj)
        elif isinstance(obj, Optimizer):
            self.optimizers[name] = OptimizerState(name, obj)
        elif callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
            self.objects[name] = obj
        else:
            kind = type(obj).__qualname__
            raise ScriptError(
                f"{name!r} cannot be protected: a {kind} has no state_dict() and load_state_dict().\n"
                "Protect modules, optimizers, schedulers, or any object that has both methods."
            )

    def parameters(self) -> dict[str, Tensor]:
        """Return every parameter once, however many modules and optimizers hold it, by name."""
        found: dict[str, Tensor] = {}
        known: set[int] = set()
        for module in self.modules.values():
            _add_new(found, known, module.parameters)
        for optimizer in self.optimizers.values():
            _add_new(found, known, optimizer.parameters())
        return found

    def fingerprint(self, *, plain: bool) -> list[int]:
        """Return numbers that stay the same as long as the tensors of `heavy()` are the same, in the same memory."""
        found: list[int] = []
        for module in self.modules.values():
            found += module.fingerprint()
        for optimizer in self.optimizers.values():
            found += optimizer.fingerprint(plain=plain)
        return found

    def has_plain(self) -> bool:
        """Say whether some optimizer keeps state that is not a tensor."""
        return any(optimizer.has_plain() for optimizer in self.optimizers.values())

    def heavy(self, names: dict[int, str]) -> Iterator[Tracked]:
        """Yield the parameters and the optimizer state; `names` gives a parameter's name by its identity."""
        for name, parameter in self.parameters().items():
            yield Tracked(name, Role.PARAMETER, parameter)
        for optimizer in self.optimizers.values():
            yield from optimizer.tensors(names)

    def buffer_values(self) -> list[Tensor]:
        """Return the buffers of this moment, in the order of `buffers()`."""
        return [buffer for module in self.modules.values() for buffer in module.buffer_values()]

    def buffers(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield name, owner and key of each buffer."""
        for module in self.modules.values():
            yield from module.buffers()

    def take(self) -> dict[str, Any]:
        """Return copies of all small values, but for buffers, generator states and plain optimizer state."""
        return {
            "modules": {name: module.take() for name, module in self.modules.items()},
            "optimizers": {name: optimizer.take() for name, optimizer in self.optimizers.items()},
            "objects": {name: copied(obj.state_dict()) for name, obj in self.objects.items()},
        }

    def reshard(self) -> None:
        """Free what FSDP2 keeps gathered."""
        for module in self.modules.values():
            module.reshard()

    def put(self, values: dict[str, Any]) -> None:
        """Set what `take` returned."""
        for name, module in self.modules.items():
            module.put(values["modules"][name])
        for name, obj in self.objects.items():
            obj.load_state_dict(copied(values["objects"][name]))
        for name, optimizer in self.optimizers.items():  # last: a scheduler may set a rate as it is loaded
            optimizer.put(values["optimizers"][name])


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that the user wrote: names shall not depend on DDP or torch.compile around it."""
    while True:
        # What torch.compile returns is known by its attribute: importing its class would take a second.
        inner = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _is_heavy(key: object, value: object) -> bool:
    """Say whether a value of an optimizer's state is copied as a tensor under a name of its own."""
    return type(key) is str and "/" not in key and isinstance(value, Tensor)


def _add_new(found: dict[str, Tensor], known: set[int], named: Any) -> None:
    for name, parameter in named:
        if id(parameter) not in known:
            known.add(id(parameter))
            if name in found:
                raise ScriptError(f"two parameters are called {name!r}.\nProtect them under different names.")
            found[name] = parameter
