"""Commands that take a script: their usage line, and the options of the table as typer parameters."""

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deadpool_run.cli.options.option import Option
from deadpool_run.cli.options.table import BY_NAME

Target = Annotated[list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", show_default=False, hidden=True)]
_USAGES = {
    "run": "Usage: deadpool-run [OPTIONS] SCRIPT [ARGS]...\n       deadpool-run COMMAND [OPTIONS]",
    "check": "Usage: deadpool-run check [OPTIONS] SCRIPT [ARGS]...",
}


_SHOW_ALL = "deadpool_run.help_all"
_FIRST_COLUMN = 26
_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def show_all_help(ctx: typer.Context, wanted: bool) -> None:
    """Print the help with all options, and exit."""
    if wanted:
        ctx.meta[_SHOW_ALL] = True
        sys.stdout.write(f"{ctx.get_help()}\n")
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=show_all_help, help="Show all options and exit.")
]


def _summary(command: Any) -> str:
    """Return the first sentence of a command's help."""
    return str(command.get_short_help_str(limit=200))


class ScriptCommand(TyperCommand):
    """A command that takes a script: its options end there, and its usage line names the script once."""

    allow_interspersed_args = False

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by panel: of a launch the most used ones, and all with --help-all."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            option = BY_NAME.get(parameter.name or "") if self.name == "run" else None
            record = parameter.get_help_record(ctx)
            if record is not None and (option is None or option.common or ctx.meta.get(_SHOW_ALL)):
                spelling, text = record
                panel = getattr(parameter, "rich_help_panel", None) or "Options"
                panels.setdefault(panel, []).append((spelling, text.replace("-", _HYPHEN)))
        own = panels.pop("Options", [])
        for panel, records in [*panels.items(), ("Options", own)]:
            with formatter.section(panel):
                formatter.write_dl(records, col_max=_FIRST_COLUMN)
        if self.name == "run":
            with formatter.section("Commands"):
                commands = [(name, _summary(command)) for name, command in ctx.parent.command.commands.items()]
                formatter.write_dl([each for each in commands if each[0] != "run"])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - click's signature
        """Write the last paragraphs, of which each line stays one."""
        formatter.write(f"\n{self.epilog}\n" if self.epilog else "")

    def get_usage(self, ctx: Any) -> str:  # noqa: ARG002 - click's signature
        """Return the usage line."""
        return _USAGES[self.name or ""]

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage line."""
        formatter.write(f"{self.get_usage(ctx)}\n")

    def get_help(self, ctx: Any) -> str:
        """Return the help, in which no option's name is broken at the end of a line."""
        return super().get_help(ctx).replace(_HYPHEN, "-")


def with_options(options: Iterable[Option], panel: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a function's `**` parameter by one parameter for each option. `panel`: their panel in the help."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*own, *(_parameter(option, panel or option.panel) for option in options)]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {each.name: each.annotation for each in parameters}
        return function

    return decorate


def _parameter(option: Option, panel: str) -> inspect.Parameter:
    kind: Any = bool | None if option.is_flag else str | None
    text = option.help + (f" Default: {option.default}." if option.default else "")
    info = typer.Option(
        *(option.short, option.flag) if option.short else (option.flag,),
        metavar=option.metavar or "",
        autocompletion=lambda: option.choices,
        help=text,
        rich_help_panel=panel,
        show_default=False,
    )
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )
