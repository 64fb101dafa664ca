"""`deadpool-run doctor`: checks whether this machine is ready for runs."""

import os
import sys
from typing import Annotated

import typer

from deadpool_run.cli.options.resolve import duration_s


def doctor(
    *,
    no_swap: Annotated[bool, typer.Option("--no-swap", help="Don't run the short job with a killed rank.")] = False,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Time limit of the short job.")] = "3m",
) -> None:
    """Check this machine: versions, limits, memory, token and ports, then a run of two ranks, one of which is killed.

    Exit codes: 0 no check is bad; 1 a check is bad.
    """
    from deadpool_run.cli.doctor.findings import Finding, Grade, findings  # noqa: PLC0415 - help does without psutil
    from deadpool_run.cli.doctor.swap import swap  # noqa: PLC0415 - as above

    timeout_s = duration_s("--timeout", timeout)
    worst = Grade.OK

    def show(found: Finding) -> None:
        nonlocal worst
        worst = Grade.BAD if Grade.BAD in (worst, found.grade) else worst
        sys.stdout.write(f"{found.grade:<5} {found.name:<16} {found.text}\n")
        sys.stdout.flush()

    for found in findings(os.environ):
        show(found)
    if not no_swap:
        show(swap(os.environ, timeout_s))
    if worst is Grade.BAD:
        raise typer.Exit(1)
