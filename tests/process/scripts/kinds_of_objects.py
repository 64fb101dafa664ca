"""Kinds of state in objects, classes, functions and what scripts attach to models and optimizers."""

import contextvars
import dataclasses
import enum
import functools
import logging
import sys
import threading
import types
from typing import NamedTuple

import torch
from kinds_kit import kind
from torch import nn

CONTEXT, LOCAL = contextvars.ContextVar("of the script", default=0), threading.local()
NAMES, MADE = types.SimpleNamespace(n=0), types.ModuleType("made_by_the_script")
MADE.n, sys.modules["made_by_the_script"] = 0, MADE
GLOBAL = 0


class Mode(enum.Enum):
    WARM = 1


@dataclasses.dataclass
class Records:
    rows: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int = 0


class Managed:
    def __init__(self):
        self._x = 0

    @property
    def x(self):
        return self._x

    @x.setter
    def x(self, value):
        self._x = value

    @functools.cached_property
    def later(self):
        return [0]


class Slots:
    __slots__ = ("n",)


class MoreSlots(Slots):
    __slots__ = ("rows",)


class Pair(NamedTuple):
    a: list
    b: dict


class Numbers(list):
    pass


class Counting(type):
    count = 0


class OfMeta(metaclass=Counting):
    pass


class Described:
    def __init__(self):
        self.values = {}

    def __get__(self, owner, kind_of_owner):
        return self.values.get("n", 0)

    def __set__(self, owner, value):
        self.values["n"] = value


class WithDescriptor:
    n = Described()


class Outer:
    class Inner:
        hits = 0


class Single:
    _one = None

    @classmethod
    def get(cls):
        if cls._one is None:
            cls._one = cls()
            cls._one.n = 0
        return cls._one


class Base:
    total = 0


class Derived(Base):
    def __init__(self):
        self.items = []


class Callable:
    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1
        return self.n


class Word(str):
    __slots__ = ("__dict__",)


class Handler(logging.Handler):
    seen = 0

    def emit(self, _record):
        self.seen += 1
        Handler.in_all = getattr(Handler, "in_all", 0) + 1


class Extra(nn.Module):
    """Has its state in `get_extra_state` alone."""

    def __init__(self):
        super().__init__()
        self._hidden = {"n": 0}

    def bump(self):
        self._hidden["n"] += 1
        return self._hidden["n"]

    def get_extra_state(self):
        return dict(self._hidden)

    def set_extra_state(self, state):
        self._hidden = dict(state)


def decorated(function):
    def wrapper():
        wrapper.calls += 1
        return function()

    wrapper.calls = 0
    return wrapper


@decorated
def calls():
    return calls.calls


def counter():
    n, held = 0, [0]

    def bump():
        nonlocal n
        n += 1
        held[0] += 2
        return n + held[0]

    return bump


def with_default(count=[0]):  # noqa: B006 - as scripts do
    count[0] += 1
    return count[0]


RECORDS, FROZEN, MANAGED, DERIVED, CALLABLE = Records(), Frozen(), Managed(), Derived(), Callable()
SLOTS, DESCRIBED, NUMBERS, WORD = MoreSlots(), WithDescriptor(), Numbers(), Word("a")
SLOTS.n, SLOTS.rows, NUMBERS.extra, WORD.n = 0, [], 0, 0
PAIR = Pair([0], {})
BUMP, PARTIAL = counter(), functools.partial(lambda a, b: a + len(b), b=[])
ERROR = ValueError("a")
LOGGER, HANDLER = logging.getLogger(__name__), Handler()
LOGGER.propagate = False
LOGGER.addHandler(HANDLER)


@kind
def rebound(_run):
    global GLOBAL, FROZEN  # noqa: PLW0603 - as scripts do
    GLOBAL += 1
    FROZEN = dataclasses.replace(FROZEN, n=FROZEN.n + 1)
    return GLOBAL + FROZEN.n


@kind
def objects(_run):
    RECORDS.rows.append(1)
    MANAGED.x += 1
    MANAGED.later[0] += 1
    NAMES.n += 1
    return len(RECORDS.rows) + MANAGED.x + MANAGED.later[0] + NAMES.n


@kind
def slots(_run):
    SLOTS.n += 1
    SLOTS.rows.append(1)
    return SLOTS.n + len(SLOTS.rows)


@kind
def derived_from_builtins(_run):
    NUMBERS.append(1)
    NUMBERS.extra += 1
    WORD.n += 1
    PAIR.a[0] += 1
    PAIR.b["n"] = PAIR.a[0]
    return len(NUMBERS) + NUMBERS.extra + WORD.n + PAIR.b["n"]


@kind
def classes(_run):
    Counting.count += 1
    Outer.Inner.hits += 1
    Base.total += 1
    DESCRIBED.n += 1
    Mode.WARM.seen = getattr(Mode.WARM, "seen", 0) + 1
    return OfMeta.count + Outer.Inner.hits + Derived.total + DESCRIBED.n + Mode.WARM.seen


@kind
def attributes_of_own(_run):
    DERIVED.items.append(1)
    DERIVED.later = getattr(DERIVED, "later", 0) + 1
    single = Single.get()
    single.n += 1
    return len(DERIVED.items) + DERIVED.later + single.n


@kind
def functions(_run):
    PARTIAL.keywords["b"].append(1)
    return BUMP() + with_default() + calls() + CALLABLE() + PARTIAL(0)


@kind
def contexts(_run):
    CONTEXT.set(CONTEXT.get() + 1)
    LOCAL.n = getattr(LOCAL, "n", 0) + 1
    MADE.n += 1
    return CONTEXT.get() + LOCAL.n + sys.modules["made_by_the_script"].n


@kind
def errors(_run):
    ERROR.args = (*ERROR.args, 1)
    ERROR.add_note("b")
    return len(ERROR.args) + len(ERROR.__notes__)


@kind
def handlers(_run):
    LOGGER.warning("x")
    return HANDLER.seen + Handler.in_all


@kind
def of_libraries(_run):
    nn.Linear.seen_by_script = getattr(nn.Linear, "seen_by_script", 0) + 1
    torch.seen_by_script = getattr(torch, "seen_by_script", 0) + 1
    return nn.Linear.seen_by_script + torch.seen_by_script


@kind
def settings(run):
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + run.step % 2)
    return threads


@kind
def attached_to_modules(run):
    run.ddp.seen += 1
    run.model.told["rows"].append(1)
    run.model.rows.append(torch.ones(2) * run.step)
    run.model.inner.__dict__.setdefault("seen", [0])[0] += 1
    run.model.inner.train(run.step % 2 == 0)
    return run.ddp.seen + len(run.model.told["rows"]) + float(sum(run.model.rows).sum()) + run.model.inner.seen[0]


@kind
def attached_to_tensors(run):
    run.model.inner.weight.seen = getattr(run.model.inner.weight, "seen", 0) + 1
    run.model.buffer.seen = getattr(run.model.buffer, "seen", 0) + 1
    run.model.volatile += 1
    return run.model.inner.weight.seen + run.model.buffer.seen + float(run.model.volatile)


@kind
def attached_to_optimizers(run):
    group = run.optimizer.param_groups[0]
    group["history"].append(1)
    group["stats"]["n"] += 1
    run.optimizer.seen += 1
    history = run.optimizer.state[run.model.inner.weight].setdefault("history", [])
    history.append(1)
    return len(group["history"]) + group["stats"]["n"] + run.optimizer.seen + len(history)


@kind
def schedule(run):
    run.scheduler.notes[0] += 1
    return run.scheduler.notes[0]


@kind
def extra_state(run):
    return run.model.extra.bump()
