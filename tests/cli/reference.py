"""The table of options as Markdown for docs/command-line.md; run this module to print it."""

import sys
from collections.abc import Iterator

from deadpool_run.cli.options.option import PANELS, Option
from deadpool_run.cli.options.table import OPTIONS


def options_reference() -> str:
    """Return one table for each group of options."""
    return "\n".join(line for panel in PANELS for line in _panel(panel))


def _panel(panel: str) -> Iterator[str]:
    yield f"### {panel}"
    yield ""
    yield "| option | default | also read from | meaning |"
    yield "| --- | --- | --- | --- |"
    for option in OPTIONS:
        if option.panel == panel:
            cells = (
                _spelling(option),
                f"`{option.default}`" if option.default else "",
                ", ".join(f"`{name}`" for name in option.variables if not name.startswith("DEADPOOL_")),
                option.help,
            )
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _spelling(option: Option) -> str:
    value = f" {option.metavar}" if option.metavar else ""
    return f"`{option.short}`, `{option.flag}{value}`" if option.short else f"`{option.flag}{value}`"


if __name__ == "__main__":
    sys.stdout.write(options_reference())
