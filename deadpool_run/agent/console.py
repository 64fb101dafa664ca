"""Lines for the user: on stderr, each with a prefix."""

import contextlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import indent

_STDERR = 2


def tell(text: str) -> None:
    """Print a line for the user. A failure is ignored: it must not end a job."""
    with contextlib.suppress(OSError):  # the terminal is gone or blocked
        os.write(_STDERR, f"deadpool-run: {text}\n".encode(errors="replace"))


def announcement(what: str, reason: str) -> str:
    """Return the text of a decision: on one line, or with a reason of several lines below it."""
    if "\n" in reason:
        return f"{what}:\n{indent(reason.rstrip(), '  ')}"
    return f"{what}: {reason}" if reason else what


def report_request(journal: Path) -> str:
    """Return the request to report an error of ours, with versions and the journal."""
    versions = ", ".join(f"{name} {installed_version(name)}" for name in ("deadpool-run", "torch"))
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"please report this error with its traceback and these:\n  {versions}, Python {python}\n  journal: {journal}"
    )


def installed_version(name: str) -> str:
    """Return the version of an installed package, or `(not installed)`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"
