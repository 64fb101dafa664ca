"""Formatting of values and tables. Pure."""

from collections.abc import Collection, Sequence

from rich.table import Table

from deadpool_run.text import printable


def table(columns: Sequence[str], left: Collection[str]) -> Table:
    """Return an empty table; columns in `left` are aligned left, others right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column.upper(), justify="left" if column in left else "right", no_wrap=column not in left)
    return made


def shown(value: object) -> str:
    """Return a value, or `-` for None."""
    return "-" if value is None else printable(value)
