"""Formatting of values and tables. Pure."""

from collections.abc import Collection, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from deadpool_run.text import printable

_GAP = 2


def table(columns: Sequence[str], left: Collection[str]) -> Table:
    """Return an empty table; columns in `left` are aligned left, others right."""
    made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column.upper(), justify="left" if column in left else "right", no_wrap=column not in left)
    return made


def fitted(  # noqa: PLR0913 - one parameter for each property of a table
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    left: Collection[str],
    width: int | None,
    can_go: Sequence[str],
    wraps: Mapping[str, int] | None = None,
) -> Table:
    """Return a table that fits into `width`: columns of `can_go` are left out, the first one first.

    `wraps` has the least widths of columns in `left` whose text may take several lines. `width` is None: all columns.
    """
    names = list(columns)
    widths = {
        name: min(
            max([len(name), *(len(line) for row in rows for line in str(row[at]).split("\n"))]),
            (wraps or {}).get(name, 1 << 16),
        )
        for at, name in enumerate(columns)
    }
    for name in can_go:
        if width is None or sum(widths[each] for each in names) + _GAP * (len(names) - 1) <= width:
            break
        names.remove(name)
    made = table(names, left)
    for row in rows:
        made.add_row(*(cell for name, cell in zip(columns, row, strict=True) if name in names))
    return made


def shown(value: object) -> str:
    """Return a value, or `-` for None."""
    return "-" if value is None else printable(value)
