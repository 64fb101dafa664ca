"""Hooks that a script registers, or removes, while it trains: of protected modules, their parameters, and optimizers.

A snapshot holds no function. So a process that has the hook gets it back, and a replacement gets a stand-in that refuses to be
called. Hooks of libraries are their own business, and are not looked at.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from deadpool_run.worker.state.numbered import NumberedObjects

_MODULE = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
"""Further tables of a module, with the keys of hooks that have a property."""
_MOST_KEPT = 256
"""Hooks that can be put back: the newest ones."""
_Owner = nn.Module | Tensor | Optimizer


@dataclass(frozen=True, slots=True, eq=False)
class _Hook:
    """One registered hook."""

    table: str
    key: int
    function: Any
    flags: tuple[str, ...] = ()


class ScriptHooks:
    """The script's hooks when its loop began, and now. For the main thread."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._own: Collection[str] = ()
        self._first: dict[str, tuple[_Hook, ...]] = {}
        """The hooks by owner, as the loop began, without owners that had none."""
        self._now: dict[str, tuple[_Hook, ...]] = {}
        self._next_id = -1
        self._new: NumberedObjects[_Hook] = NumberedObjects(_MOST_KEPT)

    def begin(self, owners: Iterable[tuple[str, Any]], own: Collection[str]) -> None:
        """Note the hooks, as the loop begins. `own` are the names of the script's Python modules."""
        self._owners = {name: each for name, each in owners if isinstance(each, nn.Module | Tensor | Optimizer)}
        self._own = own
        self._now = self._first = {}
        self._next_id = -1
        self._first = self._look()

    def take(self) -> dict[str, list[int]]:
        """Return the hooks of each owner whose hooks have changed: places in those of the beginning, and numbers below 0."""
        now = self._look()
        return {
            name: [self._number(name, hook) for hook in now.get(name, ())]
            for name in {**self._first, **now}
            if not _are_same(now.get(name, ()), self._first.get(name, ()))
        }

    def put(self, taken: Mapping[str, list[int]], refuse: Callable[[str], NoReturn]) -> None:
        """Register and remove hooks so that they are as `take` returned them."""
        now = self._look()
        for name in {**self._first, **now, **dict.fromkeys(name for name in taken if name in self._owners)}:
            first, owner = self._first.get(name, ()), self._owners[name]
            wanted = [
                first[number] if number >= 0 else self._new.get(-number) or _lost(owner, name, number, refuse)
                for number in taken.get(name, range(len(first)))
            ]
            if not _are_same(now.get(name, ()), wanted):
                _register(owner, [hook for hook in now.get(name, ()) if hook not in wanted], wanted)
                self._now[name] = tuple(wanted)
        self._next_id = -1

    def _look(self) -> dict[str, tuple[_Hook, ...]]:
        """Return the present hooks. Cheap if none was registered anywhere, as each takes the next id, and only few can go."""
        before, next_id = self._now, RemovableHandle.next_id
        names = before if next_id == self._next_id else self._owners
        found = {name: hooks for name in names if (hooks := tuple(self._hooks_of(name)))}
        self._now, self._next_id = found, next_id
        return found

    def _hooks_of(self, name: str) -> Iterator[_Hook]:
        owner, before = self._owners[name], self._now.get(name, ())
        for table in _tables(owner):
            for key, function in (getattr(owner, table, None) or {}).items():
                flags = tuple(flag for flag in _FLAGS if key in getattr(owner, flag, ()))
                same = (hook for hook in before if (hook.table, hook.key) == (table, key) and hook.function is function)
                if (hook := next(same, None)) is not None:
                    yield hook
                elif isinstance(function, _LostHook) or module_of(function) in self._own:
                    yield _Hook(table, key, function, flags)

    def _number(self, name: str, hook: _Hook) -> int:
        first = self._first.get(name, ())
        return first.index(hook) if hook in first else -self._new.number(hook)


def shown(name: str) -> str:
    """Return the owner of hooks as a user knows it."""
    return f"a hook of {name.removeprefix('protected ')}"


class _LostHook:
    """A stand-in for a hook that this process never had. Calling it is refused."""

    def __init__(self, name: str, refuse: Callable[[str], NoReturn]) -> None:
        self._name, self._refuse = name, refuse

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse(
            f"{shown(self._name)} was registered while the script trained, and no snapshot holds functions: a replacement for a lost "
            "rank does not have it.\nRegister every hook before job.steps(), and have it look at a variable that says whether it acts."
        )


def _lost(owner: _Owner, name: str, number: int, refuse: Callable[[str], NoReturn]) -> _Hook:
    return _Hook(_tables(owner)[0], number, _LostHook(name, refuse))


def _register(owner: _Owner, gone: Iterable[_Hook], wanted: Iterable[_Hook]) -> None:
    for hook in gone:
        for name in (hook.table, *hook.flags):
            getattr(owner, name).pop(hook.key, None)
    for hook in wanted:
        if isinstance(owner, Tensor) and getattr(owner, hook.table) is None:
            kind = "register_hook" if hook.table == "_backward_hooks" else "register_post_accumulate_grad_hook"
            getattr(owner, kind)(hook.function).remove()  # makes the table, which autograd then reads
        table: MutableMapping[int, Any] = getattr(owner, hook.table)
        in_order = sorted({**table, hook.key: hook.function}.items())  # of their registration
        table.clear()
        table.update(in_order)
        for flag in hook.flags:
            getattr(owner, flag)[hook.key] = True


def _tables(owner: _Owner) -> tuple[str, ...]:
    return _MODULE if isinstance(owner, nn.Module) else _TENSOR if isinstance(owner, Tensor) else _OPTIMIZER


def module_of(function: Any) -> str | None:
    """Return the name of the Python module that has the code of a hook."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None and not hasattr(function, "__module__"):
        function = type(owner)
    found = getattr(function, "__module__", None)
    return found if found is not None else type(function).__module__


def _are_same(some: Collection[_Hook], others: Collection[_Hook]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
