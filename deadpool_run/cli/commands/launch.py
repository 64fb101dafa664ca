"""`deadpool-run [OPTIONS] SCRIPT [ARGS]...`: start a job."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import typer

from deadpool_run.agent.console import tell, write_json
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.cli.cluster import slurm_place
from deadpool_run.cli.cluster.spec_builder import plan
from deadpool_run.cli.launch.script import check_target, misplaced
from deadpool_run.cli.options.config import read_config
from deadpool_run.cli.options.machine import existing_token, look_around
from deadpool_run.cli.options.parameters import HelpAll, Target, with_options
from deadpool_run.cli.options.resolve import INSIDE_WORKER, Values, resolve, unknown_variables
from deadpool_run.cli.options.table import OPTIONS
from deadpool_run.errors import UsageError

EXAMPLES = (
    "deadpool-run --nproc-per-node 4 train.py --lr 3e-4    torchrun's line",
    "deadpool-run --nproc-per-node 4 --spares 2 train.py   with two spares",
    "deadpool-run --dry-run --nproc-per-node gpu train.py  only print the plan",
)

VARIABLES = """Each option is also read from DEADPOOL_<NAME>, torchrun's options also from
PET_<NAME>, then from the configuration file. Underscores work like dashes.
`deadpool-run --version` prints the version. Each command has --help."""

EPILOG = "\n".join(("Examples:", *(f"  {each}" for each in EXAMPLES), "", VARIABLES))


def resolved(given: Mapping[str, Any], environment: Mapping[str, str]) -> Values:
    """Return the value of every option, from all its sources. Raises `UsageError`."""
    first = resolve(given, environment, {})
    name, content = ("", {}) if first.flag("no_config") else read_config(first.text("config"), environment)
    written = resolve(given, environment, content, name)
    return resolve(given, environment, content, name, slurm_place.detected(written, environment))


@with_options(OPTIONS)
def launch(*, target: Target = None, help_all: HelpAll = False, **given: str | bool | None) -> None:
    """Train with spares: takes torchrun's command line, and replaces a lost rank in place."""
    del help_all  # its callback has printed the help
    values = resolved(given, os.environ)
    if not target:
        raise UsageError("no script to run\nwrite `deadpool-run [OPTIONS] SCRIPT [ARGS]...`; --help lists the options")
    place = slurm_place.find(values, os.environ)
    nodes = slurm_place.nodes_to_start(values, place)
    here = look_around(os.environ)
    if values.flag("dry_run") or nodes:
        here = replace(here, token=existing_token)  # create none: the agents on the nodes get theirs
    elif place is not None:
        here = replace(here, token=slurm_place.token_reader(values, os.environ, place, here.token))
    spec, notes = plan(values, tuple(target), here)
    spec = replace(spec, slurm=place)
    _set_color(values.choice("color", ("auto", "always", "never")))
    if spec.json_log and not values.flag("dry_run"):
        write_json(spec.run_id)
    check_target(spec)
    notes = (*_strays(target, os.environ), *notes)
    if place is not None and nodes:
        notes = (*notes, *slurm_place.notes(place, nodes, os.environ))
    if values.flag("dry_run"):
        from deadpool_run.cli.launch.dry_run import describe  # noqa: PLC0415 - seldom needed
        from deadpool_run.vault.headroom import room  # noqa: PLC0415 - as above

        sys.stdout.write(describe(spec, notes, values, os.environ, max(0, room(spec.nproc_per_node))))
        return
    for note in notes:
        tell(note)
    if place is not None and nodes:
        from deadpool_run.cli.cluster.slurm_start import TOKEN_FILE, start  # noqa: PLC0415 - only a batch script needs it

        environment = os.environ | ({TOKEN_FILE: file} if (file := values.text("token_file")) else {})
        raise typer.Exit(start(place, nodes, sys.argv[1:], environment, spec))
    raise typer.Exit(_start(spec))


def _strays(target: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield notes about options and variables that are not read."""
    yield from misplaced(target)
    if INSIDE_WORKER not in environment:
        yield from unknown_variables(environment)


def _set_color(when: str) -> None:
    """Set NO_COLOR or FORCE_COLOR as --color asks, for this process and its children."""
    if when != "auto":
        os.environ.pop("FORCE_COLOR" if when == "never" else "NO_COLOR", None)
        os.environ["NO_COLOR" if when == "never" else "FORCE_COLOR"] = "1"


def _start(spec: LaunchSpec) -> int:
    from deadpool_run.agent.start import run  # noqa: PLC0415 - only a launch needs the agent

    try:
        return run(spec)
    except OSError as error:
        if error.filename is None:
            raise  # no path of the user's
        raise UsageError(
            f"{error.filename}: {error.strerror}\nchoose another place with --run-dir or --log-dir"
        ) from error
