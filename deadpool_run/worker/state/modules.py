"""A protected module: references to its tensors, and copies of its small values.

Parameters and optimizer state change only inside `optimizer.step()`; everything else may change at any time. References
to parameters are taken when the module is protected, and again when a step has put others in their places. Those of FSDP2 are
taken once: `named_parameters()` changes as it gathers and frees shards, but the sharded parameters themselves stay.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.errors import ScriptError, SnapshotError
from deadpool_run.vault.segments import SlotRole
from deadpool_run.worker.codec import copied
from deadpool_run.worker.compat import modules as compat_nn
from deadpool_run.worker.compat.fsdp_settings import FsdpSettings
from deadpool_run.worker.state import hooks
from deadpool_run.worker.state.optimizers import Tracked
from deadpool_run.worker.state.places import Places

_EXTRA = nn.Module.get_extra_state


class ModuleState:
    """The parameters (by reference), buffers and extra state of a module."""

    def __init__(self, name: str, module: nn.Module, wrappers: Iterable[DistributedDataParallel]) -> None:
        """`wrappers` are the DDPs of the process: one of them may be around the module."""
        self.name = name
        self._module = module
        self._wrappers = wrappers
        self._root = unwrapped(module)
        self.buckets: list[bytes | None] = []
        """Each DDP's decision of its buckets, if made after the first steps: see `ddp_buckets`."""
        self._layout: dict[str, str] = {}
        """Every parameter and buffer with its shape, as replacements create them; empty before the step loop."""
        self.sharding: list[FSDPModule] = []
        self._settings = FsdpSettings([])
        self._walk()
        self._find()

    def roots(self) -> list[nn.Module]:
        """Return the module as it was protected, the user's module inside it, and the DDPs around it."""
        return [self._module, self._root, *self.replicated]

    def begin(self) -> None:
        """Note FSDP2's settings, as the loop begins."""
        self._settings.begin()

    def find_wrappers(self) -> None:
        """Find the DDPs around the module that were made after it was protected."""
        inside = [child for child in self._module.modules() if isinstance(child, DistributedDataParallel)]
        wrapped = {id(child) for _, child in self._modules}
        around = [ddp for ddp in self._wrappers if id(unwrapped(ddp)) in wrapped and ddp not in inside]
        self.replicated = [*inside, *around]
        self.buckets += [None] * (len(self.replicated) - len(self.buckets))

    def _walk(self) -> None:
        self._modules = list(self._root.named_modules())
        # Read at the end of each step and found once here: a walk over the tree costs as much as a small copy.
        self._buffered = [(path, child) for path, child in self._modules if compat_nn.buffers_of(child)]
        self._tables = [
            table
            for _, child in self._modules
            for table in (compat_nn.parameters_of(child), compat_nn.buffers_of(child), compat_nn.children_of(child))
        ]
        self._lengths = list(map(len, self._tables))
        sharding = [(path, child) for path, child in self._modules if isinstance(child, FSDPModule)]
        if [child for _, child in sharding] != self.sharding:
            self.sharding = [child for _, child in sharding]
            self._settings = FsdpSettings(sharding)
        self.find_wrappers()
        self._extra = [(path, child) for path, child in self._modules if type(child).get_extra_state is not _EXTRA]

    def _find(self) -> None:
        """Take references to the parameters and children, and note their places in their modules."""
        self.reshard()  # after an evaluation the root has gathered parameters, not the optimizer's
        self.parameters = [(f"{self.name}/{path}", parameter) for path, parameter in self._root.named_parameters()]
        self._sharded = [parameter for _, parameter in self.parameters if isinstance(parameter, DTensor)]
        self._plain = [parameter for _, parameter in self.parameters if not isinstance(parameter, DTensor)]
        self._children = Places(
            (child, compat_nn.children_of(child)) for _, child in self._modules if compat_nn.children_of(child)
        )
        tables = [(child, compat_nn.parameters_of(child)) for _, child in self._modules]
        self._places = Places(
            (child, table)
            for child, table in tables
            if table and not (self.sharding and any(isinstance(each, DTensor) for each in table.values()))
        )  # FSDP2 exchanges its own

    def all_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the module and all that is in it, by path."""
        yield from self._root.named_modules()

    def refresh(self, *, final: bool) -> None:
        """Take references again: something was moved, replaced, or created lazily.

        With `final`, set-up and the first steps are over. Raises `ScriptError` for anything added since then, which a
        replacement would not create.
        """
        self._walk()
        layout = self._read_layout()
        difference = _first_difference(self._layout, layout) if final and self._layout else ""
        if difference:
            raise ScriptError(
                f"protect(): {difference} {self.name!r} during training, but a replacement runs only set-up and the first two "
                "steps before it restores.\nCreate every parameter and buffer in set-up, in its final shape; freeze those that "
                "train later, and give them to the optimizer with add_param_group() then."
            )
        if not self._layout or not self.sharding:  # FSDP2 may have gathered parameters; the sharded ones stay
            self._find()
        self._layout = layout

    def follow(self) -> bool:
        """Take references again if others are in the places of some, at the end of a step; return whether there were any."""
        if not (self._places.changed() or self._children.changed()):
            return False
        self._walk()
        self._find()
        return True

    def put_back(self) -> None:
        """Put the parameters and children of the last snapshot back in their places: the step that exchanged them is undone."""
        self._children.put_back()
        self._places.put_back()

    def exchanged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters by name as they are now, if some are not those of the last snapshot."""
        if self._places.changed() or self._children.changed():
            yield from ((f"{self.name}/{path}", parameter) for path, parameter in self._root.named_parameters())

    def _read_layout(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for path, child in self._modules:
            found |= {
                f"buffer {path}.{key}": "" for key in compat_nn.buffers_of(child)
            }  # buffers may change their shape
            for key, parameter in compat_nn.parameters_of(child).items():  # shared ones under all their names
                if parameter is not None:
                    found[f"parameter {path}.{key}"] = f"{tuple(parameter.shape)} of {parameter.dtype}"
        return found

    def fingerprint(self) -> list[int]:
        """Return numbers that change when parameters are moved, added or removed; `follow` notices others in their places.

        They are addresses; of shards identities, because FSDP2 makes new ones.
        """
        found = [id(compat_nn.local(parameter)) for parameter in self._sharded]
        found += map(Tensor.data_ptr, self._plain)
        found += map(len, self._tables)
        return found

    def buffer_values(self) -> list[Tensor]:
        """Return the present buffers, non-persistent ones too, in the order of `buffers()`."""
        self._find_new_buffers()
        return [
            buffer
            for _, child in self._buffered
            for buffer in compat_nn.buffers_of(child).values()  # buffers() would walk the tree again on each step
            if buffer is not None
        ]

    def places(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield name, owner and key of each buffer, also of those that are None."""
        for path, child in self._buffered:
            for key in compat_nn.buffers_of(child):
                yield f"{self.name}/{path}.{key}" if path else f"{self.name}/{key}", child, key

    def buffers(self) -> Iterator[tuple[Tracked, nn.Module, str]]:
        """Yield each buffer that is not None, with its owner and key."""
        self._find_new_buffers()
        for name, child, key in self.places():
            buffer = compat_nn.buffers_of(child)[key]
            if buffer is not None:
                yield Tracked(name, SlotRole.BUFFER, buffer), child, key

    def _find_new_buffers(self) -> None:
        if list(map(len, self._tables)) != self._lengths:  # the first steps may make some
            self._walk()

    def take(self) -> dict[str, Any]:
        """Return all other state: extra state, modes, which parameters train, which buffers are None, and DDP's and FSDP2's."""
        return {
            "extra": copied(self.extra()),
            "frozen": [name for name, parameter in self.parameters if not parameter.requires_grad],
            "absent": [name for name, child, key in self.places() if compat_nn.buffers_of(child)[key] is None],
            # Whether the next forward starts with a broadcast of the buffers: ranks that differ would hang.
            "training": self._root.training,
            "in_other_mode": [path for path, child in self._modules if child.training != self._root.training],
            "synchronizes": [ddp.require_forward_param_sync for ddp in self.replicated],
            # Whether the next backward reduces. A step in which no_sync() was interrupted has left it as it was.
            "reduces": [ddp.require_backward_grad_sync for ddp in self.replicated],
            "sharding": self._settings.take(),
            "buckets": list(self.buckets),
            "hooks": [[hooks.take_hook(state) for state in compat_nn.hook_states(ddp)] for ddp in self.replicated],
        }

    def extra(self) -> dict[str, Any]:
        """Return the extra state of those children that have one."""
        return {path: child.get_extra_state() for path, child in self._extra}

    def put(self, values: dict[str, Any]) -> None:
        """Set what `take` returned."""
        if any(own and not saved for own, saved in zip(self.buckets, values["buckets"], strict=True)):
            raise SnapshotError(
                f"DDP decided its buckets for {self.name!r} in a step that has to be undone, and cannot decide them again"
            )
        self.buckets = list(values["buckets"])
        frozen = set(values["frozen"])
        for name, parameter in self.parameters:
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)
        training, others = values["training"], set(values["in_other_mode"])
        for path, child in self._modules:
            child.training = training != (path in others)
        absent = set(values["absent"])
        for name, child, key in self.places():
            if name in absent:
                compat_nn.buffers_of(child)[key] = None
        self._put_replication(values)
        self._settings.put(values.get("sharding", {}))  # a checkpoint of an earlier version has none
        for path, child in self._extra:
            child.set_extra_state(copied(values["extra"][path]))

    def _put_replication(self, values: dict[str, Any]) -> None:
        for ddp, states, synchronizes in zip(self.replicated, values["hooks"], values["synchronizes"], strict=True):
            for state, saved in zip(compat_nn.hook_states(ddp), states, strict=True):
                hooks.put_hook(state, saved)
            ddp.require_forward_param_sync = synchronizes
        reducing = values.get("reduces", ())  # a checkpoint of an earlier version has none
        for ddp, reduces in zip(self.replicated, reducing, strict=False):
            ddp.require_backward_grad_sync = reduces

    def shape(self) -> tuple[frozenset[str], list[int]]:
        """Return the children with extra state and the number of each DDP's hooks: `put` needs the same ones."""
        extra = frozenset(path for path, _ in self._extra)
        return extra, [len(compat_nn.hook_states(ddp)) for ddp in self.replicated]

    def obstacles(self, values: dict[str, Any]) -> list[str]:
        """Return why `put` cannot set some settings of FSDP2."""
        return [f"{self.name}: {why}" for why in self._settings.obstacles(values.get("sharding", {}))]

    def reshard(self) -> None:
        """Free parameters that FSDP2 keeps gathered after an evaluation."""
        for child in self.sharding:
            child.reshard()


def _first_difference(then: dict[str, str], now: dict[str, str]) -> str:
    for name in [*then, *now]:
        kind, _, path = name.partition(" ")
        what = f"the {kind} {path.removeprefix('.')!r}"
        if name not in now:
            return f"{what} was removed from"
        if name not in then:
            return f"{what} was added to"
        if then[name] != now[name]:
            return f"{what} changed from {then[name]} to {now[name]} in"
    return ""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module without DDP or torch.compile around it: names must not depend on them."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else compat_nn.inside_compiled(module)
        if not isinstance(inner, nn.Module):
            return module
        module = inner
