"""Reads the plan of a chaos run: the words of --chaos, or its YAML file. Both name things as `kill-rank` does. Pure but for the file."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deadpool_run.agent.chaos.plan import ChaosPlan, PlannedFault
from deadpool_run.agent.chaos.victims import ACTIVITIES, Victims
from deadpool_run.cli.options.fault_kind import SLOW_S, fault_kind
from deadpool_run.cli.options.nearest import nearest
from deadpool_run.cli.options.resolve import parse_duration_s
from deadpool_run.core.injection import HANGS, KillHow, Slowness
from deadpool_run.errors import UsageError

_KEYS = ("rank", "random", "node", "spare", "agent", "how", "for", "every", "at-step", "phase", "count")
_VICTIMS = _KEYS[:4]
_FILLERS = ("a", "at", "the", "of")
"""Words that plain English puts before others: `a spare`, `at step 40`, `the agent of node a`."""
_WITHOUT_VALUE = ("random", "spare", "agent")
_FOR_A_PLAN = 'write for example "kill every 60s" or the name of a YAML file'
_MOST_BYTES = 1 << 20


class _Text(NamedTuple):
    """A value as it was written, and where."""

    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The properties of the job that a plan must fit."""

    world_size: int
    has_spares: bool
    finds_hangs: bool
    nodes: int = 1
    """With spare ones."""


def read_plan(value: str, fresh_seed: int, limits: Limits) -> ChaosPlan:
    """Return the plan that --chaos gives, as words or as a file's name. Raises `UsageError`."""
    if re.match(r"\s*(kill|seed)\b", value):
        seed, faults = _of_words(value)
    else:
        seed, faults = _of_file(Path(value))
    if not faults:
        raise UsageError(f"--chaos {value!r}: no fault in this plan\n{_FOR_A_PLAN}")
    return ChaosPlan(
        tuple(_fault(where, parts, limits) for where, parts in faults),
        fresh_seed if seed is None else _whole("seed", seed, 0),
    )


def _of_words(value: str) -> tuple[_Text | None, list[tuple[str, dict[str, _Text]]]]:
    """Return the seed, and each fault with its place in the text: `seed 7; kill rank 1 with hang every 60s`."""
    seed: _Text | None = None
    faults: list[tuple[str, dict[str, _Text]]] = []
    for clause in filter(None, map(str.strip, value.split(";"))):
        where = f"--chaos {clause!r}"
        match clause.split():
            case ["seed", number]:
                seed = _Text(number, where)
            case ["kill", *words]:
                faults.append((where, dict(_pairs(words, where))))
            case _:
                raise UsageError(f"{where}: a part begins with `kill` or is `seed N`\n{_FOR_A_PLAN}")
    return seed, faults


def _pairs(words: list[str], where: str) -> Iterator[tuple[str, _Text]]:
    rest = iter(words)
    for word in rest:
        if word in _FILLERS:
            continue
        key = {"with": "how", "step": "at-step"}.get(word, word)
        if key not in _KEYS:
            raise _unknown(where, word, ("with", *_KEYS))
        if key in _WITHOUT_VALUE:
            yield key, _Text("true", where)
            continue
        text = next(rest, None)
        if text is None:
            raise UsageError(f"{where}: `{word}` needs a value\n{_FOR_A_PLAN}")
        yield key, _Text(text, where)


def _of_file(path: Path) -> tuple[_Text | None, list[tuple[str, dict[str, _Text]]]]:
    import yaml  # noqa: PLC0415 - most runs have no plan

    try:
        with path.open(encoding="utf-8") as file:
            root = yaml.compose(file.read(_MOST_BYTES), yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"--chaos {str(path)!r}: cannot be read: {error.strerror}\n{_FOR_A_PLAN}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not YAML: {error}\nwrite `faults:`, then one `- every: 60s` per fault") from error
    seed: _Text | None = None
    faults: list[tuple[str, dict[str, _Text]]] = []
    for key, where, node in _items(path, root, ("seed", "faults")):
        if key == "seed":
            seed = _Text(_scalar(node, where), where)
            continue
        if not isinstance(node, yaml.SequenceNode):
            raise UsageError(f"{where}: not a list of faults\nwrite one `- every: 60s` per fault")
        for each in node.value:
            line = f"{path}, line {each.start_mark.line + 1}"
            parts = {name: _Text(_scalar(value, at), at) for name, at, value in _items(path, each, _KEYS)}
            faults.append((line, parts))
    return seed, faults


def _items(path: Path, node: Any, known: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Yield the keys of a mapping, where they are, and the nodes of their values. Raises `UsageError`."""
    line = 1 if node is None else node.start_mark.line + 1
    if getattr(node, "id", "") != "mapping":
        raise UsageError(f"{path}, line {line}: not a mapping\nwrite `key: value` with the keys {', '.join(known)}")
    seen: set[str] = set()
    for key_node, value in node.value:
        key = str(key_node.value).replace("_", "-")
        where = f"{path}, line {key_node.start_mark.line + 1}"
        if key not in known:
            raise _unknown(where, str(key_node.value), known)
        if key in seen:
            raise UsageError(f"{where}: `{key}` appears twice\nremove one of them")
        seen.add(key)
        yield key, f"{where}: {key}", value


def _scalar(node: Any, where: str) -> str:
    """Return a value as text; a list of values with commas."""
    if node.id == "scalar":
        return str(node.value)
    if node.id == "sequence" and all(each.id == "scalar" for each in node.value):
        return ",".join(str(each.value) for each in node.value)
    raise UsageError(f"{where}: not a value\nwrite a word or a number, for `how` also a list of words")


def _unknown(where: str, word: str, known: tuple[str, ...]) -> UsageError:
    close = nearest(word.replace("_", "-"), known)
    meant = f"did you mean `{close[0]}`? " if close else ""
    return UsageError(f"{where}: `{word}` is not known here\n{meant}known are {', '.join(known)}")


def _fault(where: str, parts: Mapping[str, _Text], limits: Limits) -> PlannedFault:
    if "every" not in parts and "at-step" not in parts:
        raise UsageError(f"{where}: no time for the fault\nadd `every 60s` or `at-step 100`")
    hows = _hows(parts, limits)
    victims = _victims(where, parts, limits)
    if victims.spare and any(isinstance(how, Slowness) for how in hows):
        raise _wrong(parts["how"], "a spare has no steps to slow", "name a rank, or another way")
    phase = parts.get("phase", _Text("", ""))
    if phase.text and phase.text not in ACTIVITIES:
        raise _wrong(phase, "not a phase", f"write one of {', '.join(ACTIVITIES)}")
    if "count" in parts and "every" not in parts:
        raise _wrong(parts["count"], "a count needs `every`", "add for example `every 60s`")
    return PlannedFault(
        victims,
        hows,
        _times(parts["every"]) if "every" in parts else None,
        _whole("at-step", parts["at-step"], 0) if "at-step" in parts else None,
        phase.text,
        _whole("count", parts["count"], 1) if "count" in parts else None,
    )


def _hows(parts: Mapping[str, _Text], limits: Limits) -> tuple[KillHow | Slowness, ...]:
    seconds = parse_duration_s(parts["for"].text) if "for" in parts else SLOW_S
    if seconds is None or seconds <= 0:
        raise _wrong(parts["for"], "not a duration", "write for example 30s or 5m")
    hows = tuple(_how(word, parts["how"], seconds, limits) for word in _words(parts, "how")) or (KillHow.SIGKILL,)
    if "for" in parts and not any(isinstance(how, Slowness) for how in hows):
        raise _wrong(parts["for"], "only a slow rank has a time", "add for example `with slow:3`")
    return hows


def _agent(where: str, parts: Mapping[str, _Text], limits: Limits) -> Victims:
    for key in ("rank", "spare", "how", "phase"):
        if key in parts:
            raise UsageError(f"{where}: `agent` and `{key}` exclude each other\nremove one of them")
    if limits.nodes == 1:
        raise UsageError(f"{where}: the run has one machine, and would end with its agent\nname a rank instead")
    node = parts["node"].text if "node" in parts else None
    return Victims(drawn=node is None, node=node, agent=True)


def _victims(where: str, parts: Mapping[str, _Text], limits: Limits) -> Victims:
    if "agent" in parts and not _is_false(parts["agent"]):
        return _agent(where, parts, limits)
    named = [key for key in _VICTIMS if key in parts and not (key in _WITHOUT_VALUE and _is_false(parts[key]))]
    if len(named) > 1:
        raise UsageError(f"{where}: {' and '.join(f'`{key}`' for key in named)} exclude each other\nremove one of them")
    if "spare" in named and not limits.has_spares:
        raise UsageError(f"{where}: the run has no spares\nadd --spares 1, or name a rank")
    if "spare" in named and parts.get("phase"):
        raise UsageError(f"{where}: a spare has no phase\nremove `phase`")
    if "rank" not in named:
        node = parts["node"].text if "node" in named else None
        return Victims(drawn="spare" not in named and node is None, node=node, spare="spare" in named)
    rank = _whole("rank", parts["rank"], 0)
    if rank >= limits.world_size:
        raise _wrong(parts["rank"], "no such rank", f"write a rank from 0 to {limits.world_size - 1}")
    return Victims(rank=rank)


def _is_false(value: _Text) -> bool:
    if value.text.lower() not in {"true", "false"}:
        raise _wrong(value, "neither true nor false", "write true or false")
    return value.text.lower() == "false"


def _words(parts: Mapping[str, _Text], key: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, parts[key].text.split(",")))) if key in parts else ()


def _how(word: str, value: _Text, slow_for_s: float, limits: Limits) -> KillHow | Slowness:
    how = fault_kind(word, slow_for_s)
    if not isinstance(how, KillHow | Slowness):
        raise _wrong(_Text(word, value.where), *how.split("\n"))
    if how in HANGS and not limits.finds_hangs:
        raise _wrong(_Text(word, value.where), "--hang-timeout 0 finds no hang", "set for example --hang-timeout 10s")
    return how


def _times(value: _Text) -> tuple[float, float]:
    least, dash, most = value.text.partition("-")
    found = parse_duration_s(least), parse_duration_s(most if dash else least)
    if found[0] is None or found[1] is None or not 0 < found[0] <= found[1] < float("inf"):
        raise _wrong(value, "not a time, or times from the least to the most", "write for example 60s or 30s-90s")
    return found[0], found[1]


def _whole(key: str, value: _Text, least: int) -> int:
    if not value.text.isdecimal() or int(value.text) < least:
        raise _wrong(value, f"{key} is a whole number from {least}", f"write for example {key} {max(least, 1)}")
    return int(value.text)


def _wrong(value: _Text, why: str, advice: str) -> UsageError:
    return UsageError(f"{value.where} {value.text!r}: {why}\n{advice}")
