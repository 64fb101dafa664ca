"""State that a script carries from step to step, each kind in another place. Its value has an effect only some steps later."""

import calendar
import collections
import csv
import dataclasses
import importlib.util
import io
import itertools
import threading
import weakref
from pathlib import Path

import msgspec
import numpy as np
import torch


class Meter:
    """A meter of a library."""

    def __init__(self):
        self.count, self.total = 0, 0.0

    def add(self, value):
        self.count, self.total = self.count + 1, self.total + value
        return self.total / self.count


class Meters:
    """A table of meters of a library, with a lock."""

    def __init__(self):
        self.lock, self.by_name, self.last = threading.Lock(), {"a": Meter(), "b": Meter()}, collections.deque(maxlen=3)

    def add(self, value):
        with self.lock:
            self.last.append(value)
            return self.by_name["ab"[value % 2]].add(value) + sum(self.last)


class Environment:
    """An environment of a library, with arrays and a generator, that refers weakly to what uses it."""

    def __init__(self, user):
        self.of, self.random = weakref.ref(user), np.random.default_rng(7)
        self.space, self.position, self.ends = [np.zeros(3), np.dtype("float32")], np.zeros(2), np.int64(0)

    def step(self):
        self.position += self.random.random(2)
        if self.position.max() > 2:
            self.position[:], self.ends = 0, self.ends + 1
        return float(self.position.sum()) + int(self.ends)


Meter.__module__ = Meters.__module__ = Environment.__module__ = "of.a.library"


class Rates(msgspec.Struct):
    """Settings that a loop changes."""

    rate: float = 1.0
    seen: list = msgspec.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A value that gives way to the next one."""

    at: int = 0
    before: "Point | None" = None


def settings():
    """Return a module of settings that is run from its file, so that no import finds it."""
    spec = importlib.util.spec_from_file_location("of_this_run", Path(__file__).with_name("settings_of_a_run.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Carriers:
    """The carriers of one loop, by name."""

    def __init__(self, names):
        self.names = names
        self.meters, self.history, self.best, self.mean = Meters(), [{"n": 0}], None, None
        self.identities = {}
        self.environment = Environment(self)
        self.settings, self.rates, self.points = settings(), Rates(), [Point()]
        self.first, self.second = torch.zeros(2, 3)
        self.table, self.raw = io.StringIO(), io.BytesIO(bytes(range(200)))
        self.rows = csv.writer(self.table)
        self.pairs = zip(itertools.cycle([3, 1, 4, 1, 5]), itertools.count(), strict=False)

    def value(self, index, parameters):
        """Return a number that depends on all earlier calls."""
        return sum(getattr(self, f"_{name}")(index, parameters) for name in self.names)

    def _module(self, index, _parameters):
        if index < 3:
            return 0.0
        import evaluation  # noqa: PLC0415 - as scripts do

        self.mean = self.mean or evaluation.Mean()
        return evaluation.counted() + self.mean.add(index)

    def _library(self, index, _parameters):
        return self.meters.add(index)

    def _environment(self, _index, _parameters):
        return self.environment.step()

    def _alias(self, index, _parameters):
        self.history.append({"n": index})
        if index % 4 == 1 or self.best is None:
            self.best = self.history[-1]
        self.best["n"] += 1
        return sum(each["n"] for each in self.history[-6:])

    def _identity(self, _index, parameters):
        for parameter in parameters:
            self.identities[id(parameter)] = self.identities.get(id(parameter), 0) + 1
        return max(self.identities.values())

    def _settings(self, index, _parameters):
        self.settings.rate *= 0.9
        self.settings.part.seen.append(index)
        return self.settings.rate + sum(self.settings.part.seen[-3:])

    def _files(self, index, _parameters):
        self.rows.writerow([index, self.table.tell()])
        return len(self.table.getvalue()) + self.raw.read(3)[-1]

    def _values(self, index, _parameters):
        self.rates.rate *= 0.8
        self.rates.seen.append(index)
        self.points[0] = Point(index + self.points[0].at, Point(index))
        return self.rates.rate + len(self.rates.seen) + self.points[0].at + self.points[0].before.at

    def _assigned(self, index, _parameters):
        calendar.turns = getattr(calendar, "turns", 0) + index
        return calendar.turns

    def _parts(self, index, _parameters):
        self.first += index
        self.second.mul_(0.5).add_(self.first)
        return float(self.second.sum())

    def _positions(self, _index, _parameters):
        return sum(next(self.pairs))
