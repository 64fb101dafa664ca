"""Checks before a launch: the script is there, is Python, and got no option that looks like one of ours."""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from deadpool_run.agent.spec import LaunchSpec, Mode, StartMethod
from deadpool_run.cli.options.nearest import nearest
from deadpool_run.cli.options.resolve import option_of
from deadpool_run.errors import UsageError

COMMANDS = (
    *("check", "ls", "status", "logs", "events", "report", "stack", "stop", "wait", "kill-rank"),
    *("drain", "prune", "doctor", "config show", "env"),
)
_SYNONYMS = {
    "list": "ls",
    "ps": "ls",
    "log": "logs",
    "cancel": "stop",
    "kill": "kill-rank",
    "top": "status",
    "clean": "prune",
}
HELP = "help"
COMMANDS_ARE = f"the commands are {', '.join(COMMANDS)}"
_INTERPRETER = re.compile(r"python[0-9.]*|torchrun|deadpool-run")
_ELF = b"\x7fELF"
_SHOWN = 3
_SCRIPTS_NAMES = frozenset(
    (
        *("role", "module", "start_method", "node_rank", "master_addr", "master_port", "local_addr", "topology"),
        *("config", "no_config", "resume", "log_dir", "run_dir", "run_id", "log_format", "color", "verbose"),
    )
)
"""Options that a script may have by the same name."""


def check_target(spec: LaunchSpec) -> None:
    """Refuse a script, module, program or interpreter that every worker would fail to start."""
    name = spec.target.argv[0]
    if spec.target.mode is Mode.PATH:
        refuse_missing_script(name)
    if spec.target.mode is Mode.MODULE and spec.python == sys.executable:
        refuse_missing_module(name)
    if spec.target.mode is Mode.EXEC and shutil.which(name) is None:
        raise UsageError(f"program {name!r}: not found\ngive its path, or remove --no-python for a Python script")
    if spec.start_method is StartMethod.SPAWN and shutil.which(spec.python) is None:
        raise UsageError(f"interpreter {spec.python!r}: not found\ncorrect or unset PYTHON_EXEC")


def refuse_missing_script(name: str) -> None:
    """Raise `UsageError` if this is no file or folder that Python can run."""
    path = Path(name)
    is_program = _is_program(path)
    if _INTERPRETER.fullmatch(path.name) and (is_program or not path.exists()):
        raise UsageError(f"{name!r} is not a script\nleave it out: `deadpool-run [OPTIONS] SCRIPT [ARGS]...`")
    if is_program:
        raise UsageError(f"script {name!r}: a program, not Python\nto start a program, add --no-python")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"script {name!r}: a folder without __main__.py\nname the script in it")
    if not path.exists():
        raise UsageError(f"script {name!r}: no such file in {Path.cwd()}\n{_advice(path)}")


def refuse_missing_module(name: str) -> None:
    """Raise `UsageError` if there is no module or package of the first part's name. Imports nothing."""
    if name.endswith(".py") and Path(name).is_file():
        raise UsageError(f"module {name!r}: the file of a script\nleave out -m")
    top = name.partition(".")[0]
    before = sys.path[:]
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        is_there = find_spec(top) is not None
    except (ImportError, ValueError):
        is_there = top in sys.modules
    finally:
        sys.path[:] = before
    if not is_there:
        raise UsageError(
            f"module {name!r}: there is no package or module {top!r}\ncheck the name, or add its folder to PYTHONPATH"
        )


def misplaced(argv: Sequence[str]) -> Iterator[str]:
    """Yield a note about options of ours that come after the script, and so are passed to it."""
    flags = [word.partition("=")[0] for word in argv[1:] if word.startswith("--")]
    found = [flag for flag in dict.fromkeys(flags) if option_of(flag) not in {"", *_SCRIPTS_NAMES}]
    if found:
        yield f"{', '.join(found)}: passed to {argv[0]}, because it comes after the script; options of deadpool-run come before it"


def _is_program(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_ELF)) == _ELF
    return False


def _advice(path: Path) -> str:
    """Return what to do about a script that is not there."""
    word = str(path)
    meant = [str(path.with_name(name)) for name in nearest(path.name, _scripts(path.parent))[:_SHOWN]]
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    if "/" in word or "." in word:
        return f"for a module, write -m {word}"
    if close := command_like(word):
        return f"for the command, run `deadpool-run {close}`; for a module, write -m {word}"
    return f"{COMMANDS_ARE}; for a module, write -m {word}"


def command_like(word: str) -> str:
    """Return the command that a word may mean; empty if none."""
    return _SYNONYMS.get(word) or next(iter(nearest(word, (*COMMANDS, HELP))), "")


def _scripts(folder: Path) -> list[str]:
    try:
        return [each.name for each in os.scandir(folder) if each.name.endswith(".py")]
    except OSError:
        return []
