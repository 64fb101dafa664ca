"""`deadpool-run doctor`: checks whether this machine is ready for runs."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from deadpool_run.cli.options.resolve import duration_s

if TYPE_CHECKING:
    from deadpool_run.cli.doctor.findings import Finding

_NOTHING_MEASURED = 3


def doctor(
    *,
    no_swap: Annotated[bool, typer.Option("--no-swap", help="Don't run the short job with a killed rank.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure steps and a killed rank on the GPUs instead.")] = False,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Time limit of one job.")] = "3m",
) -> None:
    """Check this machine: versions, limits, memory, token and ports, then a run of two ranks, one of which is killed.

    Exit codes: 0 no check is bad; 1 a check is bad; 3 --gpu, and there is no GPU.
    """
    from deadpool_run.cli.doctor.findings import Grade, findings  # noqa: PLC0415 - help does without psutil
    from deadpool_run.cli.doctor.swap import swap  # noqa: PLC0415 - as above

    timeout_s = duration_s("--timeout", timeout)
    worst = Grade.OK

    def show(found: "Finding") -> None:
        nonlocal worst
        worst = Grade.BAD if Grade.BAD in (worst, found.grade) else worst
        sys.stdout.write(f"{found.grade:<5} {found.name:<16} {found.text}\n")
        sys.stdout.flush()

    for found in findings(os.environ):
        show(found)
    is_measured = True
    if gpu:
        is_measured = _measure(show, timeout_s)
    elif not no_swap:
        show(swap(os.environ, timeout_s))
    if worst is Grade.BAD:
        raise typer.Exit(1)
    if not is_measured:
        raise typer.Exit(_NOTHING_MEASURED)


def _measure(show: "Callable[[Finding], None]", timeout_s: float) -> bool:
    """Measure on GPUs and print the report; False if there are none."""
    from deadpool_run.cli.doctor import gpu  # noqa: PLC0415 - help does without
    from deadpool_run.cli.doctor.conformance import conform  # noqa: PLC0415 - as above
    from deadpool_run.cli.doctor.findings import Finding  # noqa: PLC0415 - as above
    from deadpool_run.cli.options.machine import DEVICES, count_gpus  # noqa: PLC0415 - as above

    gpus = count_gpus(os.environ, DEVICES)
    if few := gpu.too_few(gpus):
        show(few)
    if gpus == 0:
        return False
    behaviours = list[Finding]()
    for found in conform(os.environ, timeout_s) if few is None else ():
        show(found)
        behaviours.append(found)
    rows = []
    for measured in gpu.measure(os.environ, min(gpus, gpu.MOST_RANKS), timeout_s):
        show(measured.finding)
        rows += [measured.row] if measured.row else []
    sys.stdout.write(f"\nfor a report, with the output of `deadpool-run env`:\n\n{gpu.report(rows, behaviours)}")
    return True
