"""FSDP2's settings, which a script may change in its loop: whether and how gradients are reduced, and what is gathered when.

Those that have not changed since the loop began are not kept: a durable checkpoint leaves those of set-up as they are.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

from torch.distributed.fsdp import FSDPModule

_OF_TREE = ("_state_ctx.is_last_backward", "_state_ctx.manual_backward_finalization")
"""Of the root, once the first forward has found it; the others then share its object."""
_OF_STATE = (*_OF_TREE, "_states_to_forward_prefetch", "_states_to_backward_prefetch")
_RESHARD = "post_forward_mesh_info"
_OF_GROUP = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "gradient_divide_factor",
    "reduce_scatter_unused_params",
    "force_sum_reduction_for_comms",
    "unshard_async_op",
    "unshard_in_backward",
    _RESHARD,
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "_all_reduce_hook",
    "mesh_info.reduce_scatter_process_group",
)
_AUTOMATIC = "automatic"
"""As torch decides it, once it knows the root."""

Changed = dict[str, dict[str, Any]]
"""The settings that have changed, by owner and name."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """An object with settings: the state of a module, or one of its groups of parameters."""

    name: str
    state: Any
    holder: Any
    settings: tuple[str, ...]
    """Those that this version of torch has."""
    read: Callable[[Any], Any]

    @classmethod
    def of(cls, name: str, state: Any, holder: Any, settings: tuple[str, ...]) -> Self:
        present = tuple(setting for setting in settings if _has(holder, setting))
        return cls(name, state, holder, present, attrgetter(*present))


class FsdpSettings:
    """The settings of some modules, as plain values.

    An object (a custom collective, a hook, a mesh to reshard to) is noted by its kind. A process that has had one of this kind
    in its place puts it back, and any other is refused.
    """

    def __init__(self, modules: Iterable[tuple[str, FSDPModule]]) -> None:
        self._paths: dict[Any, str] = {}
        for path, module in modules:
            self._paths.setdefault(module._get_fsdp_state(), path)  # noqa: SLF001 - several modules may share one
        self._states = {path: state for state, path in self._paths.items()}
        self._owners = list(self._find_owners())
        self._objects: dict[tuple[str, str, str], Any] = {}
        self.begin()

    def _find_owners(self) -> Iterator[_Owner]:
        for state, path in self._paths.items():
            yield _Owner.of(path, state, state, _OF_STATE)
            for index, group in enumerate(state._fsdp_param_groups):  # noqa: SLF001
                yield _Owner.of(f"{path}:{index}", state, group, _OF_GROUP)

    def begin(self) -> None:
        """Note all settings, as the loop begins."""
        self._read = self._read_all()
        self._at_begin = {owner.name: self._note(owner) for owner in self._owners}
        self._changed: Changed = {}

    def take(self) -> Changed:
        """Return the settings that have changed. Takes about a microsecond for each module."""
        read = self._read_all()
        if read != self._read:
            self._read, self._changed = read, {}
            for owner in self._owners:
                before = self._at_begin[owner.name]
                changed = {name: value for name, value in self._note(owner).items() if value != before.get(name)}
                if changed:
                    self._changed[owner.name] = changed
        return self._changed

    def obstacles(self, changed: Changed) -> list[str]:
        """Return why `put` cannot set some of these."""
        owners = {owner.name: owner for owner in self._owners}
        found = [f"no module {path.partition(':')[0]!r} is sharded here" for path in changed if path not in owners]
        found += [
            f"the loop has set FSDP2's {name} of {path.partition(':')[0]!r} to {value!r}, which this process has not had: "
            "set it before the loop"
            for path, values in changed.items()
            for name, value in values.items()
            if path in owners and not self._is_possible(owners[path], name, value)
        ]
        return found

    def _is_possible(self, owner: _Owner, name: str, value: Any) -> bool:
        if isinstance(value, list):
            return all(path in self._states for path in value)
        if not isinstance(value, str) or value == _AUTOMATIC:
            return name in owner.settings
        return (owner.name, name, value) in self._objects or self._plain(owner).get(name) == value

    def put(self, changed: Changed) -> None:
        """Set all as they were at `take`."""
        for owner in self._owners:
            present = self._plain(owner)
            for name, value in (self._at_begin[owner.name] | changed.get(owner.name, {})).items():
                if name not in present:  # the tree's, and of another module than its root
                    continue
                found = self._objects.get((owner.name, name, value)) if isinstance(value, str) else None
                if found is not None or present[name] != value:
                    self._set(owner, name, value if found is None else found)

    def _set(self, owner: _Owner, name: str, value: Any) -> None:
        if name == _RESHARD:
            automatic = value == _AUTOMATIC
            owner.state._auto_reshard_after_forward = automatic  # noqa: SLF001
            if automatic or isinstance(value, bool):
                resharded = not owner.state._is_root if automatic else value  # noqa: SLF001
                value = owner.holder.mesh_info if resharded else None
        elif isinstance(value, list):
            value = [self._states[path] for path in value]
        path, _, name = name.rpartition(".")
        setattr(attrgetter(path)(owner.holder) if path else owner.holder, name, value)

    def _read_all(self) -> list[Any]:
        return [owner.read(owner.holder) for owner in self._owners]

    def _note(self, owner: _Owner) -> dict[str, Any]:
        """Return the settings as plain values, and remember the objects of those that are no plain values."""
        plain = self._plain(owner)
        for name, value in plain.items():
            if isinstance(value, str) and value != _AUTOMATIC:
                self._objects[owner.name, name, value] = attrgetter(name)(owner.holder)
        return plain

    def _plain(self, owner: _Owner) -> dict[str, Any]:
        values = zip(owner.settings, owner.read(owner.holder), strict=True)
        is_inner = owner.state._is_root is False  # noqa: SLF001
        found = {name: self._plain_of(value) for name, value in values if not (is_inner and name in _OF_TREE)}
        if _RESHARD in found:
            info = owner.holder.post_forward_mesh_info
            if owner.state._auto_reshard_after_forward:  # noqa: SLF001
                found[_RESHARD] = _AUTOMATIC
            elif info is None or info is owner.holder.mesh_info:
                found[_RESHARD] = info is not None
        return found

    def _plain_of(self, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, list):  # of states
            paths = [self._paths.get(state) for state in value]
            return "list of other modules" if None in paths else paths
        if hasattr(value, "__float__"):
            return float(value)
        return getattr(value, "__qualname__", type(value).__qualname__)


def _has(holder: Any, setting: str) -> bool:
    try:
        attrgetter(setting)(holder)
    except AttributeError:
        return False
    return True
