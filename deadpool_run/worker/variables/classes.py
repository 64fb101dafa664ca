"""Classes of the script's that only objects refer to, because a function has made them, say; and attributes of classes."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Classes:
    """The classes that were noted while scopes were searched. They are searched last: most of them are found in modules."""

    def __init__(self) -> None:
        self._noted: dict[type, None] = {}
        self._alike: Counter[str] = Counter()
        """The number of classes of each name: a function may make several."""
        self._with_forward: set[type] = set()

    def note(self, kind: type, modules: frozenset[str]) -> None:
        """Note a class of one of these modules, with its bases."""
        if kind.__module__ in modules:
            self._noted |= dict.fromkeys(base for base in kind.__mro__ if base.__module__ in modules)

    def take(self, is_known: Callable[[object], bool]) -> Iterator[tuple[str, type]]:
        """Yield the noted classes that are not known, each under a name of its own, and forget all."""
        while self._noted:
            kind = next(iter(self._noted))
            del self._noted[kind]
            if not is_known(kind):
                name = f"class {kind.__module__}.{kind.__qualname__}"
                self._alike[name] += 1
                yield name if self._alike[name] == 1 else f"{name} ({self._alike[name]})", kind

    def owner_of_forward(self, kind: type, modules: frozenset[str]) -> type | None:
        """Return the class that has the method which runs a class of modules, once; None if it is of one of these Python modules."""
        owner = next(each for each in kind.__mro__ if "forward" in vars(each))
        if owner in self._with_forward or owner.__module__ in modules:
            return None
        self._with_forward.add(owner)
        return owner


def forward_of(kind: type) -> dict[str, Any]:
    """Return the method that runs a class of modules, by name."""
    return {"forward": vars(kind)["forward"]}


def set_of_class(kind: type, values: Mapping[str, Any]) -> None:
    """Set attributes of a class."""
    for name, value in values.items():
        setattr(kind, name, value)
