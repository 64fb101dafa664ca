"""`deadpool-run check [OPTIONS] SCRIPT [ARGS]...`: shows whether a script comes out of a repair as if nothing had happened."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deadpool_run.cli.check.plan import LEAST_STEPS, fault_count
from deadpool_run.errors import UsageError

SETTINGS = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda word: word.replace("_", "-"),
}
"""Of click: as for a run, options end at the script, and a dash may be an underscore."""


class CheckCommand(TyperCommand):
    """`check`, whose usage names the script once."""

    def get_usage(self, ctx: Any) -> str:  # noqa: ARG002 - click's signature
        """Return the usage line."""
        return "Usage: deadpool-run check [OPTIONS] SCRIPT [ARGS]..."


_CHECK, _JOB = "The check", "The job (as for a run)"


def check(  # noqa: PLR0913 - one parameter for each option
    *,
    target: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", hidden=True)] = None,
    steps: Annotated[
        int,
        typer.Option(
            "-N", "--steps", metavar="N", min=LEAST_STEPS, rich_help_panel=_CHECK, help="Steps of each run's loop."
        ),
    ] = 20,
    faults: Annotated[
        str,
        typer.Option(
            "--faults",
            metavar="all|N",
            show_default=False,
            rich_help_panel=_CHECK,
            help="Number of faults; `all` kills every rank in every phase. Default: every rank and every phase once.",
        ),
    ] = "",
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            rich_help_panel=_CHECK,
            help="Chooses other pairs of rank and phase, and other moments.",
        ),
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=1,
            rich_help_panel=_CHECK,
            help="Ends a run that takes longer; it counts as stopped.",
        ),
    ] = 1800,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            metavar="DIR",
            rich_help_panel=_CHECK,
            help="New folder for the output of each run. Default: a temporary one, kept if a run is not exact.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_CHECK, help="Print one JSON object instead of the table.")
    ] = False,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            "--nproc-per-node", metavar="N", rich_help_panel=_JOB, help="Ranks to train with; or gpu, cpu, auto."
        ),
    ] = None,
    spares: Annotated[
        str, typer.Option("--spares", metavar="N", rich_help_panel=_JOB, help="Spare workers. 0: a rank is restarted.")
    ] = "1",
    spare_mode: Annotated[
        str | None,
        typer.Option("--spare-mode", metavar="warm|hot", rich_help_panel=_JOB, help="What a spare does beforehand."),
    ] = None,
    start_method: Annotated[
        str | None,
        typer.Option(
            "--start-method", metavar="forkserver|spawn", rich_help_panel=_JOB, help="How workers are started."
        ),
    ] = None,
    capture_interval: Annotated[
        str | None,
        typer.Option("--capture-interval", metavar="STEPS", rich_help_panel=_JOB, help="Steps between two snapshots."),
    ] = None,
    drain_timeout: Annotated[
        str | None,
        typer.Option(
            "--drain-timeout", metavar="SECONDS", rich_help_panel=_JOB, help="Time for a step to end after a loss."
        ),
    ] = None,
    repair_timeout: Annotated[
        str | None,
        typer.Option(
            "--repair-timeout", metavar="SECONDS", rich_help_panel=_JOB, help="Time for each part of a repair."
        ),
    ] = None,
    preload: Annotated[
        str | None,
        typer.Option("--preload", metavar="MODULES", rich_help_panel=_JOB, help="Modules to import before forking."),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", rich_help_panel=_JOB, help="SCRIPT is the name of a module.")
    ] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", hidden=True, help="Refused: a program that is no script has no step loop.")
    ] = False,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", rich_help_panel=_JOB, help="YAML file of options.")
    ] = None,
    no_config: Annotated[
        bool, typer.Option("--no-config", rich_help_panel=_JOB, help="Read no configuration file.")
    ] = False,
) -> None:
    """Check that a killed rank does not change the weights: run a script a few steps, then again with each fault.

    The script runs twice without a fault, then once for each fault, on this machine. It needs no change, and its loop
    ends after --steps. Exit codes: 0 every run is exact; 1 some run is not.
    """
    if no_python:
        raise UsageError("--no-python: a check needs a Python script with a loop over job.steps()\nname the script")
    if not target:
        raise UsageError("no script to check\nwrite `deadpool-run check [OPTIONS] SCRIPT [ARGS]...`")
    if not module and not Path(target[0]).exists():
        raise UsageError(f"script {target[0]!r}: no such file in {Path.cwd()}\nfor a module, write -m {target[0]}")
    fault_count(faults, 1)  # refuse a bad one before the first run
    valued = {
        "--nproc-per-node": nproc_per_node,
        "--spares": spares,
        "--spare-mode": spare_mode,
        "--start-method": start_method,
        "--capture-interval": capture_interval,
        "--drain-timeout": drain_timeout,
        "--repair-timeout": repair_timeout,
        "--preload": preload,
        "--config": config,
    }
    options = [f"{name}={value}" for name, value in valued.items() if value is not None]
    options += [name for name, given in {"--module": module, "--no-config": no_config}.items() if given]
    from deadpool_run.cli.check.campaign import Wanted, check_script  # noqa: PLC0415 - help does without rich and the agent

    wanted = Wanted(
        options=options, target=target, steps=steps, faults=faults, seed=seed, timeout_s=timeout, log_dir=log_dir
    )
    raise typer.Exit(check_script(wanted, as_json=as_json))
