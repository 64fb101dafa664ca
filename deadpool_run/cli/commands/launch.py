"""`deadpool-run [OPTIONS] SCRIPT [ARGS]...`: starts a job."""

import inspect
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from deadpool_run.agent.console import tell
from deadpool_run.agent.spec import LaunchSpec, Mode, StartMethod
from deadpool_run.cli import console
from deadpool_run.cli.cluster import slurm_place
from deadpool_run.cli.cluster.spec_builder import Launch, plan
from deadpool_run.cli.options.config import NO_FILE, read_config
from deadpool_run.cli.options.machine import existing_token, look_around
from deadpool_run.cli.options.resolve import Values, resolve
from deadpool_run.cli.options.table import OPTIONS
from deadpool_run.errors import UsageError

COMMANDS = {
    "check": "kill each rank once, and compare the weights with those of a run without a fault",
    "status": "show a live run: its ranks, spares and last repairs",
    "kill-rank": "end a rank's process, to see it replaced",
    "config show": "print every option, its value and where that comes from",
    "env": "print what a bug report needs",
}

EXAMPLES = (
    "torchrun's line as it is: `deadpool-run --nproc-per-node 4 train.py --lr 3e-4`",
    "With two spares: `deadpool-run --nproc-per-node 4 --spares 2 train.py`",
    "What would be started: `deadpool-run --dry-run --nproc-per-node gpu --spares 1 -m my.train`",
)

VARIABLES = (
    "Each option is also read from DEADPOOL_NAME, torchrun's also from PET_NAME, then from the configuration file. "
    "Underscores may stand for dashes."
)

EPILOG = "\n\n".join(("Examples", *EXAMPLES, "Commands: " + ", ".join(COMMANDS) + " (each has --help)", VARIABLES))


def resolved(given: Mapping[str, Any], environment: Mapping[str, str]) -> Values:
    """Return every option's value, the configuration file's and Slurm's among them. Raises `UsageError`."""
    first = Values(resolve(given, environment, {}))
    file = NO_FILE if first.flag("no_config") else read_config(first.text("config"), environment)
    written = Values(resolve(given, environment, file.content, file.name))
    found = slurm_place.detected(written, environment)
    return Values(resolve(given, environment, file.content, file.name, found))


def launch(*, target: list[str] | None = None, **given: str | bool | None) -> None:
    """Train with spares: torchrun's command line, and a lost rank's place is taken by a spare, in place."""
    values = resolved(given, os.environ)
    if not target:
        raise UsageError("no script to run\nwrite `deadpool-run [OPTIONS] SCRIPT [ARGS]...`; --help lists the options")
    place = slurm_place.find(values, os.environ)
    nodes = slurm_place.nodes_to_start(values, place)
    here = look_around(os.environ)
    if values.flag("dry_run") or nodes:
        here = replace(here, token=existing_token)  # make none: those who are started get theirs
    elif place is not None:
        here = replace(here, token=slurm_place.token_reader(values, os.environ, place, here.token))
    planned = plan(values, tuple(target), here)
    planned = replace(planned, spec=replace(planned.spec, slurm=place))
    console.set_color(values.choice("color", {"auto": "auto", "always": "always", "never": "never"}))
    _check_target(planned.spec)
    if place is not None and nodes:
        planned = replace(planned, notes=(*planned.notes, *slurm_place.notes(place, nodes, os.environ)))
    if values.flag("dry_run"):
        from deadpool_run.cli.commands.dry_run import describe  # noqa: PLC0415 - seldom needed

        sys.stdout.write(describe(planned, values, os.environ))
        return
    for note in planned.notes:
        tell(note)
    if place is not None and nodes:
        from deadpool_run.cli.cluster.slurm_start import start  # noqa: PLC0415 - only a batch script needs it

        raise typer.Exit(start(place, nodes, sys.argv[1:], os.environ, planned.spec))
    raise typer.Exit(_start(planned))


def _start(planned: Launch) -> int:
    from deadpool_run.agent.start import run  # noqa: PLC0415 - only a launch needs the agent

    try:
        return run(planned.spec)
    except OSError as error:
        if error.filename is None:
            raise  # not of a path that the user could choose otherwise
        raise UsageError(f"{error.filename}: {error.strerror}\ngive another place: --run-dir, --log-dir") from error


def _check_target(spec: LaunchSpec) -> None:
    """Refuse what would fail in every worker in the same way."""
    name = spec.target.argv[0]
    if spec.target.mode is Mode.PATH and not Path(name).exists():
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"for the command, write `deadpool-run {close[0]}`; " if close else ""
        raise UsageError(f"script {name!r}: no such file in {Path.cwd()}\n{hint}for a module, write -m {name}")
    if spec.target.mode is Mode.EXEC and shutil.which(name) is None:
        raise UsageError(f"program {name!r}: not found\ngive its path, or leave --no-python out for a Python script")
    if spec.start_method is StartMethod.SPAWN and shutil.which(spec.python) is None:
        raise UsageError(f"interpreter {spec.python!r}: not found\ncorrect or unset PYTHON_EXEC")


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a function that takes `target` and every option by name the signature that typer reads."""
    parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                bool | None if option.is_flag else str | None,
                typer.Option(
                    *(option.short, option.flag) if option.short else (option.flag,),
                    metavar=option.metavar or "",
                    help=option.help + (f" Default: {option.default}." if option.default else ""),
                    rich_help_panel=option.panel,
                    show_default=False,
                ),
            ],
        )
        for option in OPTIONS
    ]
    target = inspect.Parameter(
        "target",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", show_default=False, hidden=True)
        ],
    )
    function.__signature__ = inspect.Signature([*parameters, target])  # type: ignore[attr-defined]
    function.__annotations__ = {each.name: each.annotation for each in (*parameters, target)}
    return function
