"""Commands that take a script: their usage line, and the options of the table as typer parameters."""

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deadpool_run.cli.options.option import Option

Target = Annotated[list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", show_default=False, hidden=True)]
_USAGES = {
    "run": "Usage: deadpool-run [OPTIONS] SCRIPT [ARGS]...\n        deadpool-run COMMAND [OPTIONS]",
    "check": "Usage: deadpool-run check [OPTIONS] SCRIPT [ARGS]...",
}


class ScriptCommand(TyperCommand):
    """A command that takes a script: its options end there, and its usage line names the script once."""

    allow_interspersed_args = False

    def get_usage(self, ctx: Any) -> str:  # noqa: ARG002 - click's signature
        """Return the usage line."""
        return _USAGES[self.name or ""]


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
        help=text.replace("[", r"\["),  # brackets are rich's markup
        rich_help_panel=panel,
        show_default=False,
    )
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )
