"""docs/command-line.md says what the command line does."""

import re
from pathlib import Path

import pytest
from reference import options_reference
from typer.main import get_command

from deadpool_run.cli import app as app_module
from deadpool_run.cli.app import app
from deadpool_run.cli.launch.script import COMMANDS
from deadpool_run.cli.options.option import PANELS
from deadpool_run.cli.options.table import OPTIONS

COMMAND_MODULES = Path(app_module.__file__).parent / "commands"
PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
START, END = "<!-- options: made by `python tests/cli/reference.py` -->\n", "<!-- end of options -->"


def section(name):
    return PAGE.read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_the_options_are_those_of_the_table():
    page = PAGE.read_text()
    assert page.partition(START)[2].partition(END)[0].strip() == options_reference().strip()


def test_every_option_has_a_panel_and_a_flag_of_its_own():
    assert {option.panel for option in OPTIONS} == set(PANELS)
    assert len({option.flag for option in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "env"])
def test_a_commands_usage_line_names_exactly_its_options(name):
    command = get_command(app)
    for word in name.split():
        command = command.commands[word]
    taken = {opt for each in command.params for opt in each.opts if opt.startswith("--") and opt != "--help"}
    usage = section(name).partition("```\n")[2].partition("```")[0]
    assert set(re.findall(r"--[a-z-]+", usage.replace("deadpool-run", ""))) == taken


@pytest.mark.parametrize(
    ("name", "default"),
    [
        *((name, "the only live run, else the last one") for name in ("logs", "events", "report", "wait")),
        *((name, "the only live run") for name in ("status", "stack", "stop", "kill-rank", "drain")),
    ],
)
def test_the_help_says_which_run_is_meant_without_a_name(name, default):
    (option,) = (each for each in get_command(app).commands[name].params if each.name == "run_id")
    assert option.help == f"The run's name. Default: {default}."


def test_every_command_has_a_section():
    commands = set(get_command(app).commands) - {"run", "config"} | {"config show"}
    headings = set(re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE))
    assert commands <= headings


def test_every_command_is_in_a_module_of_its_name():
    modules = {path.stem.replace("_", "-") for path in COMMAND_MODULES.glob("[!_]*.py")}
    assert modules == set(get_command(app).commands) - {"run"} | {"launch"}
