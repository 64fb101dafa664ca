"""Variables of more kinds come back: values in functions, containers of the script's own classes, iterators, library values."""

import array
import asyncio
import builtins
import collections
import contextvars
import csv
import ctypes
import datetime as dt
import decimal
import enum
import fractions
import functools
import importlib.util
import io
import itertools
import math
import multiprocessing
import pathlib
import random
import sys
import tempfile
import threading
import types
import typing
import weakref

import pytest
import torch
from kit.taken import Taken
from snapshot_kit import in_child

from deadpool_run.errors import RefusedError
from deadpool_run.worker.variables.values.kinds.iterators import progress_of
from deadpool_run.worker.variables.values.lost import LostValue, raise_refused
from deadpool_run.worker.variables.variables import Variables

STEPS = 5


class Words(dict):
    pass


class Attributes(dict):
    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


class Itself(dict):
    def __init__(self, **values):
        super().__init__(**values)
        self.__dict__ = self


class Ordered(collections.OrderedDict):
    def __iter__(self):
        raise AssertionError("code of the script")


class Counts(collections.Counter):
    pass


class Lists(collections.defaultdict):
    pass


class Numbers(list):
    total = 0


class Recent(collections.deque):
    pass


class Phase(enum.Enum):
    WARM = 1
    HOT = "hot"


CONTEXT = contextvars.ContextVar("of the tests")
LOCAL = threading.local()


def named(count={"n": 0}):  # noqa: B006 - as scripts do
    count["n"] += 1
    return count["n"]


def noted():
    noted.count = getattr(noted, "count", 0) + 1
    return noted.count


class Holder:
    def method(self, *, seen=[0]):  # noqa: B006 - as scripts do
        seen[0] += 1
        return seen[0]


def defaults():
    named.__defaults__[0]["n"] = 0
    return named


def function_attribute():
    noted.__dict__.clear()
    return noted


def method_default():
    Holder.method.__kwdefaults__["seen"][0] = 0
    return Holder().method


def partial():
    def add(state, more, *, by):
        state["n"] += more + by["n"]
        return state["n"]

    return functools.partial(add, {"n": 0}, 1, by={"n": 2})


def containers():
    words, numbers, recent = Words(n=0), Numbers(), Recent(maxlen=2)
    words.also = 0
    attributes, itself = Attributes(n=0), Itself(n=0)
    ordered, counts, lists = Ordered(a=1, b=2), Counts(), Lists(list)

    def bump():
        words["n"] += 1
        words.also += 2
        numbers.append(words["n"])
        numbers.total += 3
        recent.append(words["n"])
        attributes.n += 1
        itself.n += 1
        ordered.move_to_end(next(collections.OrderedDict.__iter__(ordered)))
        counts["x"] += 1
        lists["x"].append(words["n"])
        assert itself["n"] == itself.n
        return (
            *(dict(words), words.also, list(numbers), numbers.total, list(recent), attributes.n, itself.n),
            *(list(collections.OrderedDict.items(ordered)), counts["x"], dict(lists), recent.maxlen),
        )

    return bump


def a_dict_with_a_model():
    words = Words(model=torch.nn.Linear(1, 1), n=0)

    def bump():
        words["n"] += 1
        return words["n"]

    return bump


def standard_library():
    table = collections.ChainMap({"n": 0})
    users = collections.UserDict(n=0)

    def bump():
        table["n"] += 1
        users["n"] += 1
        return table["n"], users["n"]

    return bump


def library_values():
    day, number, part, phase = (
        dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        decimal.Decimal(0),
        fractions.Fraction(0),
        Phase.WARM,
    )
    path, kind, device, shape, some = pathlib.Path("/a"), torch.float32, torch.device("cpu"), torch.Size([1]), range(0)
    raw, numbers = bytearray(b"x"), array.array("i", [0])

    def bump():
        nonlocal day, number, part, phase, path, kind, device, shape, some
        day += dt.timedelta(days=1)
        number += decimal.Decimal("0.5")
        part += fractions.Fraction(1, 3)
        phase = Phase.HOT if phase is Phase.WARM else Phase.WARM
        path /= "b"
        kind = torch.float64 if kind == torch.float32 else torch.float32
        device = torch.device("meta", len(path.parts))
        shape = torch.Size([*shape, 1])
        some = range(len(some) + 1)
        raw.append(7)
        numbers[0] += 1
        return day, number, part, phase, path, kind, device, shape, some, bytes(raw), list(numbers)

    return bump


class Totals(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("sums", ctypes.c_double * 2))


ARENA = multiprocessing.RawValue("i")
"""Keeps the memory of shared numbers open, which otherwise a test opens first."""


class Masker:
    """Counts its calls in all processes of a loader."""

    def __init__(self):
        self.calls = multiprocessing.Value("i", -1)

    def call(self):
        with self.calls.get_lock():
            self.calls.value += 1
        return self.calls.value


def shared_numbers():
    masker, progress, counts = Masker(), multiprocessing.Value("d", 0.0), multiprocessing.Array("i", 3)
    raw, number, table = multiprocessing.RawArray("l", 2), ctypes.c_int(3), (ctypes.c_int * 2 * 2)()
    totals = multiprocessing.Value(Totals)

    def bump():
        progress.value += 0.5
        counts[1] += 2
        raw[0] -= 1
        number.value *= 3
        table[1][0] += 1
        totals.count += 1
        totals.sums[1] += 2
        shared = progress.value, list(counts), list(raw), totals.count, list(totals.sums)
        return masker.call(), shared, number.value, table[1][0]

    return bump


class Level(enum.Enum):
    """Members with attributes of their own."""

    LOW = 1
    HIGH = 2

    def __init__(self, _):
        self.hits, self.seen = 0, []


def members():
    for each in Level:
        each.__init__(each.value)

    def bump():
        level = Level.HIGH if Level.LOW.hits % 2 else Level.LOW
        Level.LOW.hits += 1
        level.seen.append(Level.LOW.hits)
        return Level.LOW.hits, list(Level.LOW.seen), list(Level.HIGH.seen)

    return bump


class Step(int):
    pass


class Loss(float):
    """A number with a unit. Its class would not make it from the number alone."""

    def __new__(cls, value, unit):
        made = super().__new__(cls, value)
        made.unit = unit
        return made

    def __float__(self):
        raise AssertionError("code of the script")


class Name(str):
    __slots__ = ("note",)

    def __str__(self):
        raise AssertionError("code of the script")


class Pair(tuple):
    __slots__ = ()


class Point(collections.namedtuple("Point", "x y")):  # noqa: PYI024, SLOT002 - as scripts do
    pass


class Shouted(enum.Enum):
    """Its values are not those by which its members are found."""

    A = "a"
    B = "b"

    @property
    def value(self):
        return self._value_.upper()


class Items(list, typing.Generic[typing.TypeVar("T")]):
    pass


class Table(dict, collections.abc.MutableMapping):
    pass


def parts_that_are_made_anew():
    """A tuple of the script's class with a tensor that a restore cannot write to."""
    with torch.inference_mode():
        total = torch.zeros(5000)
    held = {"pair": Pair((total, "x"))}

    def bump():
        with torch.inference_mode():
            held["pair"][0][77] += 1
        return float(held["pair"][0][77])

    return bump


PAD, UNSET = Name("pad"), Pair(("unset",))


def looks():
    """Objects that scripts compare by identity, and classes whose base has empty slots."""
    slots = {"pad": PAD, "unset": UNSET, "n": 0}
    items, table, point, shouted = Items(), Table(n=0), Point(1, 2), Shouted.A
    point.seen = 0

    def bump():
        nonlocal point, shouted
        slots["n"] += 1
        items.append(slots["n"])
        table["n"] += 1
        seen, point = point.seen, Point(point.y, point.x)
        point.seen = seen + 1
        shouted = Shouted.B if shouted is Shouted.A else Shouted.A
        there = slots["pad"] is PAD, slots["unset"] is UNSET, slots["n"]
        return *there, list(items), dict(table), tuple(point), point.seen, shouted

    return bump


def own_values():
    step, loss, name, pair, units = Step(0), Loss(-0.0, "nat"), Name("a"), Pair((1, 2)), {}

    def bump():
        nonlocal step, loss, name, pair
        step, loss, name = Step(step + 1), Loss(loss * 2, f"{step} bit"), Name(name + "b")
        pair = Pair((pair[1], pair[0] + 1))
        units[step] = loss.unit
        kinds = list(map(type, (step, loss, name, pair, *units)))
        return int(step), loss.hex(), loss.unit, str.__str__(name), tuple(pair), dict(units), kinds

    return bump


def iterators():
    of_python = [
        *(itertools.count(1), itertools.cycle("abc"), iter(list(range(99))), iter(range(99)), enumerate("abcdefghij")),
        *(
            zip(range(99), itertools.count(), strict=False),
            itertools.chain([1, 2], range(99)),
            reversed(list(range(99))),
        ),
        *(
            itertools.islice(range(99), 2, 50),
            iter("abcdefghij"),
            iter({1: 2, 3: 4, 5: 6, 7: 8, 9: 10, 11: 12, 13: 14}),
        ),
    ]
    steps, also = of_python[0], of_python[0]

    def bump():
        assert steps is also
        return [next(steps), *map(next, of_python[1:])]

    return bump


def context():
    CONTEXT.set(0)

    def bump():
        CONTEXT.set(CONTEXT.get() + 1)
        return CONTEXT.get()

    return bump


def thread_local():
    LOCAL.n = 0

    def bump():
        LOCAL.n += 1
        return LOCAL.n

    return bump


def cyclic():
    class Part:
        def __init__(self, whole):
            self.whole, self.n = whole, 0

    class Whole:
        def __init__(self):
            self.part = Part(self)

        def bump(self):
            self.part.n += 1
            return self.part.n, self.part.whole is self

    return Whole().bump


class Metric(torch.nn.Module):
    """An unprotected class of the script."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.inner, self.seen = torch.nn.Module(), 0
        self.inner.register_buffer("last", None)

    def forward(self):
        self.total += 1
        self.seen += 1
        self.best = max(getattr(self, "best", 0), 2 * self.seen)
        self.inner.last = torch.full((2,), float(self.seen))
        return float(self.total), self.seen, self.best, self.inner.last.tolist()


def own_module():
    return torch.nn.ModuleDict({"metric": Metric(), "other": torch.nn.Linear(1, 1)})["metric"].forward


def chosen_module():
    nets = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    current = nets[0]

    def bump():
        nonlocal current
        current = nets[1] if current is nets[0] else nets[0]
        return nets.index(current)

    return bump


def positive(value):
    return abs(value)


def negative(value):
    return -abs(value)


class Trainer:
    def __init__(self):
        self.step, self.calls = self.first, 0

    def first(self):
        self.calls += 1
        self.step = self.second
        return 1

    def second(self):
        self.calls += 1
        self.step = self.first
        return 2


def references():
    """Functions, methods, classes and loaders that are exchanged for others, which every process has."""
    doubled, halved = (lambda value: 2 * value), (lambda value: value / 2)
    function, unnamed, act, kind, trainer = positive, doubled, torch.relu, Words, Trainer()
    loaders = [torch.utils.data.DataLoader(range(first, 9)) for first in (0, 5)]
    loader, losses, call = loaders[0], [torch.nn.functional.l1_loss, doubled], functools.partial(max, 1)
    calls = 0

    def bump():
        nonlocal function, unnamed, act, kind, loader, call, calls
        calls += 1
        call = functools.partial(pow, calls, exp=2) if calls % 3 else functools.partial(max, calls)
        function = negative if function is positive else positive
        unnamed = halved if unnamed is doubled else doubled
        act = torch.tanh if act is torch.relu else torch.relu
        kind = Attributes if kind is Words else Words
        loader = loaders[loader is loaders[0]]
        losses.reverse()
        return (
            *(trainer.step(), trainer.calls, function(3), unnamed(4), float(act(torch.tensor(-1.0))), kind.__name__),
            *(len(loader.dataset), losses[0](3) if losses[0] is doubled else 0, call() if calls % 3 else call(2)),
        )

    return bump


def functions_of_modules():
    """Functions that are variables of a Python module, of a class, and of a protected module."""
    this = sys.modules[__name__]
    this.chosen, Trainer.chosen = positive, negative

    def bump():
        this.chosen, Trainer.chosen = Trainer.chosen, this.chosen
        return this.chosen(3), Trainer.chosen(3)

    return bump


def files_in_memory():
    table, numbers = io.StringIO(newline=""), io.BytesIO(b"abc")
    writer = csv.writer(table)

    def bump():
        writer.writerow([len(table.getvalue())])
        found = numbers.read(1)
        numbers.write(found * 2)
        numbers.seek(-1, io.SEEK_CUR)
        return table.getvalue(), numbers.getvalue(), numbers.tell()

    return bump


def unlisted_modules():
    """Settings in a file that is run, as some frameworks have them, and a module without a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "settings_of_a_run.py"
        file.write_text("rate = 1\nclass Part:\n    count = 0\npart = Part()\n")
        spec = importlib.util.spec_from_file_location("settings_of_a_run", file)
        settings, scratch = importlib.util.module_from_spec(spec), types.ModuleType("scratch")
        spec.loader.exec_module(settings)
    scratch.seen = []

    def bump():
        settings.rate += 1
        settings.part.count += 2
        scratch.seen.append(settings.rate)
        scratch.last = len(scratch.seen)
        return settings.rate, settings.part.count, list(scratch.seen), scratch.last

    return bump


def namespaces():
    """The variables of code that is compiled from text. Python puts its own functions among them."""
    variables = {"calls": 0}
    exec("def count():\n    global calls\n    calls += 1\n    return abs(calls)", variables)
    tables = [vars(math), {"inner": vars(builtins)}]

    def bump():
        tables.reverse()
        return variables["count"](), variables["calls"], [each is vars(math) for each in tables]

    return bump


KINDS = [
    *(defaults, function_attribute, method_default, partial, containers, a_dict_with_a_model, standard_library),
    *(library_values, iterators, context, thread_local, cyclic, own_module, chosen_module),
    *(references, functions_of_modules, shared_numbers, own_values, members, looks, parts_that_are_made_anew),
    *(namespaces, files_in_memory, unlisted_modules),
]


def run(make, taken, *, until, and_then=0):
    """Call the function from `make` in each step. Restore the snapshot in `taken`, or take one if there is none. Return the next results."""
    variables, bump = Variables(), make()
    variables.begin()
    if until == 0 and not taken:
        taken.append(variables.take())
    for step in range(until + and_then):
        bump()
        if step == until - 1 and not taken:
            taken.append(variables.take())
        else:
            variables.take()
    variables.put(taken[0])
    return bump(), bump()


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("until", [0, 1, STEPS])
def test_a_survivor_repeats_with_what_it_had(make, until):
    expected = run(make, Taken(), until=until)
    assert run(make, Taken(), until=until, and_then=1) == expected


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("rehearsed", [0, 2, STEPS + 1])
def test_a_replacement_goes_on_with_what_the_lost_rank_had(make, rehearsed):
    taken = Taken()
    expected = run(make, taken, until=STEPS)
    assert run(make, taken, until=rehearsed) == expected


def replaced_as_by_a_worker():
    for name in ("copyright", "credits", "exit", "help", "license", "quit"):  # of a terminal's Python
        if hasattr(builtins, name):
            delattr(builtins, name)
    taken = Taken()
    return run(namespaces, taken, until=STEPS), run(namespaces, taken, until=2)


@pytest.mark.usefixtures("_warm")
def test_functions_of_python_itself_stay_as_they_are():
    expected, found = in_child(replaced_as_by_a_worker)
    assert found == expected


def test_a_metric_of_a_library_is_kept():
    kind = type("Metric", (torch.nn.Module,), {"__module__": "metrics.of_a_library"})

    def run(taken, *, steps):
        variables, metric = Variables(), kind()
        metric.values = [torch.zeros(())]
        variables.begin()
        for _ in range(steps):
            metric.values.append(torch.ones(3))
        taken.append(variables.take())
        metric.values.append(torch.ones(3))
        variables.put(taken[0])
        return len(metric.values)

    taken = Taken()
    assert run(taken, steps=3) == 4
    assert run(taken, steps=1) == 4


def test_a_variable_holds_the_protected_object_that_it_held():
    def run(taken, *, steps):
        generator, critic = torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (generator, critic)]
        variables = Variables()
        now, optimizer, layer = generator, optimizers[0], None
        variables.begin([generator, critic, *optimizers], [("generator", generator), ("generator.0", generator[0])])
        for step in range(steps):
            now, optimizer = (critic, optimizers[1]) if step % 2 == 0 else (generator, optimizers[0])
            layer = generator[0]
        taken.append(variables.take())
        now, optimizer, layer = (None, None, None) if taken else (now, optimizer, layer)
        variables.put(taken[0])
        return now is critic, optimizer is optimizers[1], layer is generator[0]

    taken = Taken()
    assert run(taken, steps=3) == (True, True, True)
    assert run(taken, steps=2) == (True, True, True)


class Counting(torch.optim.SGD):
    """An optimizer with state in addition to torch's."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.calls, self.slow = 0, {}


class Scaling:
    """A hook with a state."""

    calls = 0

    def __call__(self, _module, _inputs, output):
        self.calls += 1
        return output * self.calls


def attached(model):
    """Return a function that changes and reads the attributes of a protected model and its optimizer."""
    optimizer, hook, ids, best = Counting(model.parameters()), Scaling(), {}, None
    model[0].register_forward_hook(hook)
    model[0].weight.seen = 0
    model.steps = 0

    def bump():
        nonlocal best
        optimizer.calls += 1
        for parameter in model.parameters():
            optimizer.slow[parameter] = optimizer.slow.get(parameter, torch.zeros(())) + 1
            ids[id(parameter)] = ids.get(id(parameter), 0) + 2
        model[0].weight.seen += 1
        model[0].weight.last = model[0].weight.seen * 2
        model.steps += 1
        model[1].p = 0.1 * model.steps
        best = model[0].weight if model.steps % 2 else model[0].bias
        return (
            *(optimizer.calls, [float(optimizer.slow[each]) for each in model.parameters()]),
            *([ids[id(each)] for each in model.parameters()], model[0].weight.seen, model[0].weight.last, model[1].p),
            *(best is model[0].weight, float(model(torch.ones(1)).sum()) if hook.calls < 99 else 0),
        )

    return optimizer, bump


def run_attached(taken, *, until, and_then=0):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Dropout(0.0)).eval()
    optimizer, bump = attached(model)
    variables = Variables()
    parts = [*((f"model.{path}", each) for path, each in model.named_modules()), *model.named_parameters()]
    variables.begin([model, optimizer], parts)
    for step in range(until + and_then):
        bump()
        if step == until - 1 and not taken:
            taken.append(variables.take())
    variables.put(taken[0])
    return bump(), bump()


def test_what_scripts_attach_to_protected_objects_comes_back():
    taken = Taken()
    expected = run_attached(taken, until=STEPS)
    assert run_attached(Taken(), until=STEPS, and_then=1) == expected
    assert run_attached(taken, until=2) == expected


def test_objects_of_a_module_in_a_package_of_the_script_come_back(monkeypatch):
    """The module's name has a dot, and its package is not among the script's modules."""
    package = types.ModuleType("team.tracking")
    package.__file__ = __file__
    monkeypatch.setitem(sys.modules, "team.tracking", package)
    exec("class Tracker:\n    seen = 0\n    def bump(self): self.seen += 1", vars(package))
    model, variables = torch.nn.Linear(1, 1), Variables()
    model.tracker = package.Tracker()
    variables.begin([model], [("protected model", model)])
    model.tracker.bump()
    taken = variables.take()
    model.tracker.bump()
    variables.put(taken)
    assert model.tracker.seen == 1


def test_a_protected_object_may_have_the_name_of_the_scripts_module():
    model, variables = torch.nn.Linear(1, 1), Variables()
    model.scale = None
    variables.begin([model], [(__name__, model)])
    taken = variables.take()
    model.scale = 2
    variables.put(taken)
    assert model.scale is None


def generator():
    def numbers():
        yield from range(99)

    return numbers()


def loader():
    return iter(torch.utils.data.DataLoader(torch.arange(99)))


def text():
    return pathlib.Path(__file__).open()


def mapped():
    return map(str, range(99))


def through_a_generator():
    return enumerate(number for number in range(99))


def alike():
    """A generator that looks the same at each yield: what it draws from has the position."""

    def drawn(source):
        while True:
            yield source.random()

    return drawn(random.Random(3))


def called():
    """An iterator that calls a function: its position is in what that reads."""
    return iter(io.TextIOWrapper(io.BytesIO(b"word\n" * 99)).readline, "")


UNKEPT = [generator, loader, text, mapped, through_a_generator]


@pytest.mark.parametrize("make", [*UNKEPT, alike, called], ids=lambda make: make.__name__)
def test_a_replacement_cannot_advance_an_iterator_whose_position_is_lost(make):
    def advance(taken, *, steps):
        variables, iterator = Variables(), make()
        variables.begin()
        for _ in range(steps):
            next(iterator)
            variables.take()
        taken.append(variables.take())
        variables.put(taken[0])
        return iterator, variables.too_large

    taken = Taken()
    iterator, reported = advance(taken, steps=3)
    next(iterator)  # nothing has changed since
    assert make in (text, called) or [name.rpartition(".")[2] for name in reported] == [
        "iterator"
    ]  # files do not tell while they are read
    iterator, _ = advance(taken, steps=2)
    with pytest.raises(RefusedError, match=r"iterator is carried from step to step.*\n"):
        next(iterator)


@pytest.mark.parametrize("make", [generator, loader, mapped, through_a_generator], ids=lambda make: make.__name__)
def test_a_survivor_cannot_repeat_a_step_with_an_iterator_that_has_advanced(make):
    variables, iterator, unmoved = Variables(), make(), make()
    variables.begin()
    next(iterator)
    taken = variables.take()
    next(iterator)
    variables.put(taken)
    next(unmoved)
    with pytest.raises(RefusedError, match="position"):
        next(iterator)


@pytest.mark.parametrize(
    "make", [lambda: (number for number in range(3)), through_a_generator], ids=["plain", "within"]
)
def test_a_generator_that_is_used_up_needs_no_position(make):
    """As of `clip = partial(clip_grad_norm_, model.parameters())`, which clips in the first step only."""

    def advance(taken, *, used_up):
        variables, iterator = Variables(), make()
        variables.begin()
        if used_up:
            assert list(iterator)
        taken.append(variables.take())
        variables.put(taken[0])
        return list(iterator)

    taken = Taken()
    assert advance(taken, used_up=True) == []
    assert advance(taken, used_up=False) == []


def test_the_trial_leaves_iterators_to_its_comparison():
    variables, iterator = Variables(), generator()
    variables.begin()
    taken = variables.take()
    next(iterator)
    variables.trying = True
    variables.put(taken)
    assert next(iterator) == 1


def test_files_that_are_written_and_the_step_loop_are_left_alone(tmp_path):
    variables = Variables()
    with (tmp_path / "log").open("w+") as log:
        variables.begin()
        taken = variables.take()
        log.write("x")
        variables.put(taken)
        log.write("y")
    assert (tmp_path / "log").read_text() == "xy"


def test_data_in_an_unkept_variable_is_freed():
    variables, batch = Variables(), torch.zeros(65 << 20, dtype=torch.uint8)
    gone = weakref.ref(batch)
    variables.begin()
    batch.fill_(1)
    variables.take()
    batch = None
    assert gone() is None


@pytest.mark.parametrize("rehearsed", [1, 2, 5])
def test_a_generator_that_the_loop_runs_in_needs_no_position(rehearsed):
    def run(taken, *, steps):
        variables, total = Variables(), 0

        def loop(jobs):
            nonlocal total
            variables.begin()
            for step in range(steps):
                jobs = [threading.Thread(target=print, args=(step,))]  # is not kept
                total += len(jobs)
                yield total
                now = variables.take()
            taken.append(now) if not taken else variables.put(taken[0])
            yield total + 1

        training = loop(())
        for _ in range(steps):
            next(training)
        return next(training), next(training, "ended")

    taken = Taken()
    assert run(taken, steps=STEPS) == (STEPS + 1, "ended")
    assert run(taken, steps=rehearsed) == (STEPS + 1, "ended")


def test_a_look_at_a_generator_uses_no_lost_value_in_it():
    def numbers(_lost):
        yield 1
        yield 2

    generator = numbers([LostValue("one", "no reason", raise_refused)])
    next(generator)
    before = progress_of(generator)
    next(generator)
    assert progress_of(generator) != before


def test_the_next_of_an_iterator_is_lost_as_the_iterator_itself():
    """As of `take = iter(loader).__next__`."""

    def advance(taken, *, steps):
        variables, take = Variables(), generator().__next__
        variables.begin()
        for _ in range(steps):
            take()
            variables.take()
        taken.append(variables.take())
        variables.put(taken[0])
        return take, variables.too_large

    taken = Taken()
    take, reported = advance(taken, steps=3)
    assert take() == 3  # nothing has changed since
    assert [name.rpartition(".")[2] for name in reported] == ["take"]
    take, _ = advance(taken, steps=2)
    with pytest.raises(RefusedError, match="position"):
        take()


def test_a_coroutine_cannot_await_a_lost_value():
    async def step(lost):
        return await lost

    with pytest.raises(RefusedError, match="batch is carried from step to step"):
        asyncio.run(step(LostValue("batch", "no reason", raise_refused)))


@pytest.mark.parametrize("leave", [io.BytesIO.close, io.BytesIO.getbuffer])
def test_a_file_in_memory_that_cannot_be_written_gives_way_to_another_or_to_a_refusal(leave):
    variables, file = Variables(), io.BytesIO()
    variables.begin()
    file.write(b"one")
    taken = variables.take()
    file.write(b"two")
    kept = leave(file)
    variables.put(taken)
    if kept is None:
        assert (file.getvalue(), file.tell()) == (b"one", 3)
    else:
        with pytest.raises(RefusedError, match="carried from step to step"):
            file.getvalue()
