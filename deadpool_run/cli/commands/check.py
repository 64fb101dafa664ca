"""`deadpool-run check [OPTIONS] SCRIPT [ARGS]...`: kill each rank once and compare the weights."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from deadpool_run.cli.check.plan import LEAST_STEPS, fault_count
from deadpool_run.cli.launch.script import refuse_missing_script
from deadpool_run.cli.options.parameters import Target, with_options
from deadpool_run.cli.options.resolve import duration_s
from deadpool_run.cli.options.table import BY_NAME
from deadpool_run.errors import UsageError

_option = partial(typer.Option, rich_help_panel="The check")
_JOB_OPTIONS = (
    *("nproc_per_node", "spares", "spare_mode", "start_method", "capture_interval", "abort_timeout"),
    *("repair_timeout", "preload", "module", "config", "no_config"),
)
_DEFAULT_SPARES = "1"

Steps = Annotated[int, _option("-N", "--steps", metavar="N", min=LEAST_STEPS, help="Steps of each run.")]
Faults = Annotated[
    str,
    _option(
        metavar="all|N",
        autocompletion=lambda: ["all"],
        show_default=False,
        help="Number of faults; `all` kills every rank in every phase. Default: every rank and every phase once.",
    ),
]
Seed = Annotated[int, _option(metavar="N", min=0, help="Seed of the choice of ranks, phases and moments.")]
Timeout = Annotated[str, _option(metavar="TIME", help="Stop a run that takes longer than this.")]
LogDir = Annotated[
    Path | None,
    _option(
        metavar="DIR",
        help="New folder for the output of each run. Default: a temporary one, kept if a run is not exact.",
    ),
]
AsJson = Annotated[bool, _option("--json", help="Print one JSON object instead of the table.")]
NoPython = Annotated[bool, typer.Option("--no-python", hidden=True)]


@with_options(
    [
        replace(BY_NAME[name], default=_DEFAULT_SPARES if name == "spares" else BY_NAME[name].default)
        for name in _JOB_OPTIONS
    ],
    panel="The job (as for a run)",
)
def check(  # noqa: PLR0913 - one parameter for each option
    *,
    target: Target = None,
    steps: Steps = 20,
    faults: Faults = "",
    seed: Seed = 0,
    timeout: Timeout = "30m",
    log_dir: LogDir = None,
    as_json: AsJson = False,
    no_python: NoPython = False,
    **job: str | bool | None,
) -> None:
    """Check that a killed rank does not change the weights: run a script a few steps, then again with each fault.

    The script runs without a fault, also with torchrun, then once for each fault, on this machine. It needs no change, and
    its loop ends after --steps. Exit codes: 0 every run is exact; 1 some run is not.
    """
    if no_python:
        raise UsageError("--no-python: a check needs a Python script with a loop over job.steps()\nname the script")
    if not target:
        raise UsageError("no script to check\nrun `deadpool-run check [OPTIONS] SCRIPT [ARGS]...`")
    if not job["module"]:
        refuse_missing_script(target[0])
    timeout_s = duration_s("--timeout", timeout)
    fault_count(faults, 1)  # refuse a bad number before the first run
    from deadpool_run.cli.check.campaign import check_script  # noqa: PLC0415 - help does without rich and the agent
    from deadpool_run.cli.check.run import CheckRunner  # noqa: PLC0415 - as above

    given = {name: value for name, value in job.items() if value is not None}
    runner = CheckRunner(
        list(_words({"spares": _DEFAULT_SPARES} | given)), target, steps, timeout_s, bool(job["module"])
    )
    raise typer.Exit(check_script(runner, faults, seed, log_dir, as_json=as_json))


def _words(given: Mapping[str, str | bool]) -> Iterator[str]:
    """Yield the launcher's words for these options."""
    for name, value in given.items():
        flag = BY_NAME[name].flag
        if not BY_NAME[name].is_flag:
            yield f"{flag}={value}"
        elif value:
            yield flag
