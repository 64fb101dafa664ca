"""The places of a module's parameters and children, and what was at each when the last snapshot was taken.

A script may put another parameter in place of one (`net.weight = nn.Parameter(new)`), in any step. A step that is undone must
find the objects of the snapshot again: optimizers and variables refer to them.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn

Table = dict[str, Any]


class Places:
    """Tables of modules, with copies of them."""

    def __init__(self, tables: Iterable[tuple[nn.Module, Table]] = ()) -> None:
        self._owners = list(tables)
        self._tables = [table for _, table in self._owners]
        self._kept = list(map(dict, self._tables))
        self._ids = self.ids()

    def ids(self) -> list[int]:
        """Return the identities of what is in the tables now. Runs at the end of each step."""
        return list(map(id, chain.from_iterable(map(dict.values, self._tables))))

    def changed(self) -> bool:
        """Return whether another object is in a table. No identity is used again, because the copies keep theirs alive."""
        return self.ids() != self._ids

    def put_back(self) -> None:
        """Put every object back in its place, and remove those that were added."""
        if not self.changed():
            return
        for (owner, table), kept in zip(self._owners, self._kept, strict=True):
            for key, obj in kept.items():
                if obj is not None and table.get(key) is not obj:
                    setattr(owner, key, obj)  # some modules keep references to their parameters (nn.LSTM)
            if list(map(id, table.values())) != list(map(id, kept.values())):
                table.clear()
                table.update(kept)
