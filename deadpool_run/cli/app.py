"""The `deadpool-run` command: runs a script, unless the first word is a command."""

import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.completion import Shells, get_completion_script  # type: ignore[attr-defined]  # not in its __all__
from typer.core import TyperGroup, TyperOption
from typer.exceptions import TyperException

from deadpool_run.agent.console import installed_version, tell
from deadpool_run.cli.commands.check import check
from deadpool_run.cli.commands.config import config_show
from deadpool_run.cli.commands.doctor import doctor
from deadpool_run.cli.commands.drain import drain
from deadpool_run.cli.commands.env import env
from deadpool_run.cli.commands.events import events
from deadpool_run.cli.commands.kill_rank import kill_rank
from deadpool_run.cli.commands.launch import EPILOG, launch
from deadpool_run.cli.commands.logs import logs
from deadpool_run.cli.commands.ls import ls
from deadpool_run.cli.commands.prune import prune
from deadpool_run.cli.commands.report import report
from deadpool_run.cli.commands.stack import stack
from deadpool_run.cli.commands.status import status
from deadpool_run.cli.commands.stop import stop
from deadpool_run.cli.commands.wait import wait
from deadpool_run.cli.launch.script import COMMANDS_ARE, HELP, command_like
from deadpool_run.cli.options.parameters import ScriptCommand
from deadpool_run.cli.options.resolve import canonical
from deadpool_run.errors import DeadpoolError, UsageError

_WIDTH = 100
"""The most columns of the help."""
_OWN_OPTIONS = {"--version", "--install-completion", "--show-completion", "--print-completion"}
_FIRST_WORD = "deadpool_run.first_word"
"""The shell completes the first word of the line, which may be a command."""


class _DefaultRun(TyperGroup):
    """Runs `run` if the first word is not a command. `help COMMAND` means `COMMAND --help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == [HELP]:
            args = [*self._named(args[1:], ctx), *([] if ctx.resilient_parsing else ["--help"])]
        if ctx.resilient_parsing and not args:
            rest = super().parse_args(ctx, args)
            ctx.meta[_FIRST_WORD] = True
            return rest
        if not args or (args[0] not in self.commands and args[0].partition("=")[0] not in _OWN_OPTIONS):
            args = ["run", *args]
        if args[0] == "run":
            args = ["run", *_canonical(ctx, args[1:])]
        return super().parse_args(ctx, args)

    def _named(self, words: list[str], ctx: Any) -> list[str]:
        """Return the words that name a command, without others after it. Raises `UsageError` unless the shell completes."""
        names: list[str] = []
        command: Any = self
        for word in words:
            if not isinstance(command, TyperGroup) or word == HELP or word.startswith("-"):
                break
            if word not in command.commands:
                if ctx.resilient_parsing:
                    break
                meant = command_like(word)
                advice = f"did you mean `deadpool-run {HELP} {meant}`?" if meant else COMMANDS_ARE
                raise UsageError(f"{word!r}: no such command\n{advice}")
            names.append(word)
            command = command.commands[word]
        return names

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its own parameters, and those of `run` while the shell completes the first word: it may belong to either."""
        own = super().get_params(ctx)
        if _FIRST_WORD not in ctx.meta:
            return own
        names = {each.name for each in own}
        others = [each for each in self.commands["run"].get_params(ctx) if each.name not in names]
        return [*own, *(each for each in others if isinstance(each, TyperOption))]


def _canonical(ctx: Any, args: list[str]) -> list[str]:
    try:
        return canonical(args)
    except UsageError:
        if ctx.resilient_parsing:  # the shell completes a line that is not right yet
            return args
        raise


app = typer.Typer(
    cls=_DefaultRun,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDTH},
)
app.command("run", cls=ScriptCommand, hidden=True, epilog=EPILOG)(launch)
_underscores_as_dashes = {"token_normalize_func": lambda word: word.replace("_", "-")}
app.command(
    "check",
    cls=ScriptCommand,
    context_settings=_underscores_as_dashes,
    short_help="Kill each rank once in short runs, and compare the weights.",
)(check)
app.command("ls", short_help="List the runs of this machine, live and ended.")(ls)
app.command("status", short_help="Show a live run.")(status)
app.command("logs", short_help="Show what workers have written to log files.")(logs)
app.command("events", short_help="Show what happened in a run, in words.")(events)
app.command("report", short_help="Write a page with charts of a run.")(report)
app.command("stack", short_help="Print what the threads of a worker do now.")(stack)
app.command("stop", short_help="Stop a live run in order.")(stop)
app.command("wait", short_help="Wait for the end of a run.")(wait)
app.command("kill-rank", short_help="Kill a rank, to see it replaced.")(kill_rank)
app.command("drain", short_help="Move ranks to spares, for maintenance.")(drain)
app.command("prune", short_help="Remove records and logs of ended runs.")(prune)
app.command("doctor", short_help="Check this machine, with a killed rank.")(doctor)
app.command("env", short_help="Print versions and variables for a bug report.")(env)
config = typer.Typer(help="Show what options are set to.")
config.command("show")(config_show)
app.add_typer(config, name="config")


@app.callback()
def _root(
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    print_completion: Annotated[
        Shells | None, typer.Option(help="Print the completion script of a shell and exit, as torchrun does.")
    ] = None,
) -> None:
    """Train with spares."""
    if print_completion:
        script = get_completion_script(
            prog_name="deadpool-run", complete_var="_DEADPOOL_RUN_COMPLETE", shell=print_completion.value
        )
        sys.stdout.write(f"{script}\n")
    if version:
        sys.stdout.write(f"deadpool-run {installed_version('deadpool-run')}\n")


def main() -> NoReturn:
    """Run `deadpool-run`. Raises SystemExit with the exit code."""
    try:
        code = app(prog_name="deadpool-run", standalone_mode=False)
    except DeadpoolError as error:
        _complain(str(error))
        code = error.exit_code
    except TyperException as error:
        _complain(f"{error.format_message()}\nrun `deadpool-run --help` for usage")
        code = UsageError.exit_code
    except typer.Abort:
        code = 1
    sys.exit(code)


def _complain(message: str) -> None:
    """Print an error; lines after the first are indented."""
    tell(message.replace("\n", "\n  "), level="error", event="error")
