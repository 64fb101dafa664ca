"""The value of each option and its source: command line, environment, file or default. Pure.

A value stays text (`1` and `0` for a flag), so a bad one is refused in the same words whatever its source.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from deadpool_run.cli.options.nearest import nearest
from deadpool_run.cli.options.option import Option
from deadpool_run.cli.options.table import BY_NAME, BY_SHORT, OPTIONS
from deadpool_run.errors import UsageError

_PREFIXES = "KMGT"
_SIZE = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?([{_PREFIXES}])(i?B|)", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?(ms|s|m|h|d)?")
_UNITS_S: Mapping[str | None, float] = {"ms": 1e-3, None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_ADVICE = "write seconds, such as 30 or 0.5, or a unit: 90s, 10m, 1.5h"
DEFAULT = "default"
HELP_WORDS = frozenset({"--help", "--help-all"})
DETECTED = "Slurm"
"""Source of values found in the scheduler's variables."""
INSIDE_WORKER = "DEADPOOL_WORKER"
"""Set in a worker's environment. A launch inside a worker must not use the outer run's settings."""
_OTHER_VARIABLES = frozenset({"DEADPOOL_TOKEN", "DEADPOOL_RUN_DIR", "DEADPOOL_CHECK", "DEADPOOL_MARK"})
"""Variables that are no options."""
_FOREIGN_VARIABLES = ("DEADPOOL_TEST_",)


@dataclass(frozen=True, slots=True)
class Value:
    """An option's value and its source: `--spares`, `DEADPOOL_SPARES`, a file's name, `Slurm` or `default`."""

    text: str
    source: str

    @property
    def is_set(self) -> bool:
        """Whether the user set it."""
        return self.source not in {DEFAULT, DETECTED}


def canonical(args: Sequence[str]) -> list[str]:
    """Return the arguments with full option names and a `--` before the script.

    As in torchrun, underscores work like dashes, a unique prefix of a long option is enough, and a `--` right before
    or right after the script is dropped. Raises `UsageError` for a long option that is unknown or ambiguous.
    """
    result: list[str] = []
    rest = list(args)
    while rest:
        if rest[0] in {"--", "-"} or not rest[0].startswith("-"):
            target = rest[1:] if rest[0] == "--" else rest
            if target[1:2] == ["--"]:
                del target[1]
            return [*result, "--", *target] if target else result
        option, spelled = _spelled(rest.pop(0))
        result.append(spelled)
        if option and not option.is_flag and spelled in {option.flag, option.short}:
            result += rest[:1]
            del rest[:1]
    return result


def _spelled(arg: str) -> tuple[Option | None, str]:
    """Return the option that an argument names, if any, and the argument with the full name."""
    if not arg.startswith("--"):
        return BY_SHORT.get(arg[:2]), arg
    name, equals, value = arg.partition("=")
    wanted = name[2:].replace("-", "_")
    if name in HELP_WORDS or not wanted:
        return None, arg
    fitting = [wanted] if wanted in BY_NAME else [each for each in BY_NAME if each.startswith(wanted)]
    if not fitting:
        meant = _one_of(nearest(wanted, BY_NAME))
        raise UsageError(
            f"no such option: {name}\n{f'did you mean {meant}? ' if meant else ''}run `deadpool-run --help` for usage"
        )
    if len(fitting) > 1:
        raise UsageError(f"{name} is ambiguous: it may be {_one_of(fitting)}\nwrite one of them in full")
    option = BY_NAME[fitting[0]]
    return option, option.flag + equals + value


def option_of(flag: str) -> str:
    """Return the name of the option that a long flag means; empty if none."""
    wanted = flag[2:].replace("-", "_")
    return wanted if wanted in BY_NAME else ""


def _one_of(names: Sequence[str]) -> str:
    """Return the flags of these options, as a choice."""
    *most, last = [BY_NAME[name].flag for name in names] or [""]
    return f"{', '.join(most)} or {last}" if most else last


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that looks like an option's, and is none. None inside a worker."""
    known = {variable for option in OPTIONS for variable in option.variables} | _OTHER_VARIABLES
    for variable in sorted(environment):
        if not variable.startswith("DEADPOOL_") or variable in known or variable.startswith(_FOREIGN_VARIABLES):
            continue
        close = nearest(variable.removeprefix("DEADPOOL_").lower(), [option.name for option in OPTIONS if option.env])
        meant = f": did you mean DEADPOOL_{close[0].upper()}?" if close else ""
        yield f"{variable} has no effect: no option reads it{meant}"


def parse_duration_s(text: str) -> float | None:
    """Return a duration in seconds, from a number of them or one with a unit; None if it is neither."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _UNITS_S[match[2]]


def duration_s(where: str, text: str, zero: str = "") -> float:
    """Return a positive duration in seconds. `zero` says what 0 does, where it is allowed. Raises `UsageError`."""
    seconds = parse_duration_s(text)
    if seconds is not None and (0 < seconds < float("inf") or (zero and seconds == 0)):
        return seconds
    why = "not a duration" if seconds is None else "not a positive duration"
    raise UsageError(f"{where} {text!r}: {why}\n{_DURATION_ADVICE}" + (f"; 0 {zero}" if zero else ""))


def resolve(
    given: Mapping[str, str | bool | None],
    environment: Mapping[str, str],
    file: Mapping[str, object],
    file_name: str = "",
    detected: Mapping[str, str] = MappingProxyType({}),
) -> "Values":
    """Return each option's value from the first source that has one.

    The order is: command line (`given`; None means not given), `DEADPOOL_*`, `PET_*`, file, detected, default. An empty
    variable counts as unset. Raises `UsageError` if the file sets something that is not an option.
    """
    in_file = {_file_key(key, file_name): value for key, value in file.items()}

    def value(option: Option) -> Value:
        held = given.get(option.name)
        if held is not None:
            return Value(_text(held), option.flag)
        for variable in () if INSIDE_WORKER in environment else option.variables:
            if environment.get(variable):
                return Value(environment[variable], variable)
        if in_file.get(option.name) is not None:
            return Value(_file_text(option, in_file[option.name], file_name), file_name)
        if option.name in detected:
            return Value(detected[option.name], DETECTED)
        return Value(option.default or ("0" if option.is_flag else ""), DEFAULT)

    return Values({option.name: value(option) for option in OPTIONS})


def _text(value: object) -> str:
    return ("1" if value else "0") if isinstance(value, bool) else str(value)


def _file_key(key: object, file_name: str) -> str:
    name = str(key).replace("-", "_")
    if name not in BY_NAME or not BY_NAME[name].in_file:
        known = [option.name for option in OPTIONS if option.in_file]
        close = nearest(name, known)
        advice = f"did you mean `{close[0]}`?" if close else "`deadpool-run run --help` lists the options"
        raise UsageError(f"{file_name}: `{key}` is not an option that a file can set\n{advice}")
    return name


def _file_text(option: Option, value: object, file_name: str) -> str:
    if isinstance(value, list) and all(isinstance(part, (str, int, float)) for part in value):
        return ",".join(str(part) for part in value)
    if isinstance(value, (str, bool, int, float)):
        return _text(value)
    raise UsageError(
        f"{file_name}: `{option.name}` is a {type(value).__name__}, which is not a value for {option.flag}\n"
        "write a string, a number, true, false or a list of strings"
    )


class Values:
    """The resolved options, converted on access. Every reader raises `UsageError` with source and value."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def refuse(self, name: str, why: str, advice: str) -> UsageError:
        """Return the error for an option's value."""
        return UsageError(f"{self._where(name)} {self.text(name)!r}: {why}\n{advice}")

    def _where(self, name: str) -> str:
        source = self._values[name].source
        return source if source in {BY_NAME[name].flag, DEFAULT} else f"{source}: {name}"

    def text(self, name: str) -> str:
        """Return the text."""
        return self._values[name].text

    def flag(self, name: str) -> bool:
        """Return the value of a flag."""
        text = self.text(name).strip().lower()
        if text in {"1", "true", "yes", "on"}:
            return True
        if text in {"0", "false", "no", "off"}:
            return False
        raise self.refuse(name, "neither true nor false", "write 1 or 0, true or false")

    def count(self, name: str, at_least: int) -> int:
        """Return a whole number."""
        try:
            number = int(self.text(name))
        except ValueError as error:
            raise self.refuse(name, "not a whole number", f"write a whole number from {at_least}") from error
        if number < at_least:
            raise self.refuse(name, "too small", f"write a whole number from {at_least}")
        return number

    def optional_count(self, name: str, at_least: int) -> int | None:
        """Return a whole number; None if the option is empty."""
        return self.count(name, at_least) if self.text(name) else None

    def seconds(self, name: str, *, or_zero: bool = False) -> float:
        """Return a positive duration in seconds; with `or_zero` also 0."""
        return duration_s(self._where(name), self.text(name), "disables it" if or_zero else "")

    def nbytes(self, name: str) -> int | None:
        """Return a size in bytes; None if the option is empty. As in Slurm's `--mem`, a G is a GiB; a GB is 10^9 bytes."""
        text = self.text(name)
        if not text:
            return None
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise self.refuse(name, "not a size with a unit", "write for example 8GiB or 500MB")
        number, prefix, rest = match.groups()
        factor = 1000 if rest.lower() == "b" else 1024
        size = int(float(number) * factor ** (1 + _PREFIXES.index(prefix.upper())))
        if size < 1:
            raise self.refuse(name, "too small", "write for example 8GiB or 500MB")
        return size

    def quantity(self, name: str, example: str, units: str = "KMBT", suffix: str = "") -> int | None:
        """Return a number, with or without one of the units: 10^3, 10^6 ...; None if the option is empty."""
        text = self.text(name)
        if not text:
            return None
        match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)([{units}]?){suffix}", text.strip(), re.IGNORECASE)
        number = 0 if match is None else int(float(match[1]) * 1000 ** f" {units}".index(match[2].upper() or " "))
        if number < 1:
            raise self.refuse(name, "not a number from 1", f"write for example {example}")
        return number

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Return the text, which must be one of the choices."""
        text = self.text(name)
        if text not in choices:
            raise self.refuse(name, "not one of its values", f"write one of {', '.join(choices)}")
        return text

    def words(self, name: str) -> tuple[str, ...]:
        """Return the parts of a list separated by commas, without empty ones."""
        return tuple(word for part in self.text(name).split(",") if (word := part.strip()))
