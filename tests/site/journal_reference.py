"""The table of the journal's events and orders for docs/run-directory.md; run this module to print it."""

import inspect
from collections.abc import Iterator
from typing import get_args

from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event
from deadpool_run.structs import Tagged


def reference() -> str:
    """Return both tables as Markdown."""
    return "\n".join(("### Events", "", *_table(get_args(Event)), "", "### Orders", "", *_table(get_args(Effect))))


def _table(kinds: tuple[type[Tagged], ...]) -> Iterator[str]:
    yield "| `type` | fields | meaning |"
    yield "| --- | --- | --- |"
    for kind in sorted(kinds, key=lambda each: each.__name__):
        fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
        meaning = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
        yield f"| `{kind.__name__}` | {fields} | {meaning} |"


if __name__ == "__main__":
    print(reference())
