"""Which variables of a running function are dead: assigned again before they are read, on every path."""

import random
import sys
from contextlib import suppress

import pytest

from deadpool_run.worker.process.frames import module_frames, script_frames, set_local_variables
from deadpool_run.worker.process.liveness import dead_in_modules, dead_variables


def dead_in(loop):
    """Return what is dead in a function when it asks for its first step, and for the next."""
    found = []

    def steps():
        frame = sys._getframe(1)
        found.append(dead_variables(frame))
        yield 0
        found.append(dead_variables(frame))

    loop(steps())
    assert len(set(found)) == 1  # the same place, so the same variables
    return found[0]


def test_the_batch_the_loss_and_the_step():
    def loop(steps):
        total = 0
        for step in steps:
            inputs, targets = step, 1
            loss = inputs + targets
            total += loss
        return total

    assert dead_in(loop) == {"step", "inputs", "targets", "loss"}


def test_a_variable_that_is_read_after_the_loop():
    def loop(steps):
        for step in steps:
            loss = step
        return loss

    assert dead_in(loop) == {"step"}


def test_a_variable_that_one_path_does_not_assign():
    def loop(steps):
        best = worst = None
        for step in steps:
            if step > 0:
                best = step
            worst = step or worst
            print(best, worst)

    assert dead_in(loop) == {"step"}


def test_an_exception_before_the_assignment():
    def loop(steps):
        loss = other = 0
        for step in steps:
            try:
                loss = 1 // (step + 1)
            except ZeroDivisionError:
                print(loss)
            other = step
            print(other)

    assert dead_in(loop) == {"step", "other"}


def test_an_exception_instead_of_the_next_step():
    def loop(steps):
        loss = other = None
        try:
            for step in steps:
                loss = other = step
                print(other)
        except ValueError:
            print(loss)

    assert dead_in(loop) == {"step", "other"}


def test_a_context_manager_may_swallow_an_exception():
    class Swallows:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return True

    def loop(steps):
        loss = None
        for step in steps:
            with Swallows():
                loss = step
                inside = loss
                print(inside)
            print(loss)

    assert dead_in(loop) == {"step", "inside"}


def test_a_deleted_variable_has_to_be_there():
    def loop(steps):
        first = last = 0
        for step in steps:
            del first
            first = last = step
            del last
            last = first
            print(last)

    assert dead_in(loop) == {"step", "last"}


def test_a_variable_that_a_function_inside_shares():
    def loop(steps, given=0):
        shared = own = 0

        def read():
            return shared, given

        for step in steps:
            given = shared = own = step
            print(read(), own)

    assert dead_in(loop) == {"step", "own"}


def test_a_comprehension_with_the_same_name():
    def loop(steps):
        each = kept = 0
        for step in steps:
            kept = [each + 1 for each in range(step)]
            print(kept)
        return each

    assert "each" not in dead_in(loop)


READS = ["locals()", "vars()", "dir()", "eval('0')", "exec('0')", "globals()"]


@pytest.mark.parametrize("read", READS)
def test_nothing_is_dead_where_variables_are_read_by_name(read):
    names = {}
    exec(f"def loop(steps):\n    for step in steps:\n        loss = step\n        print(loss, {read})", names)
    assert dead_in(names["loop"]) == set()


@pytest.mark.parametrize("read", READS)
def test_what_was_read_by_name_before_the_loop_makes_no_difference(read):
    names = {}
    exec(f"def loop(steps):\n    {read}\n    for step in steps:\n        loss = step\n        print(loss)", names)
    assert dead_in(names["loop"]) == {"step", "loss"}


def test_a_variable_that_a_text_names():
    def loop(steps):
        frame = None
        for step in steps:
            print(frame, "price > @limit")
            limit = lower = step
            print(limit, lower)

    assert dead_in(loop) == {"step", "lower"}


def test_a_function_under_a_debugger():
    def loop():
        frame = sys._getframe()
        before = dead_variables(frame)
        frame.f_trace = lambda *_: None
        unused = before
        return before, dead_variables(frame), unused

    before, now, _ = loop()
    assert before == {"before", "unused"}
    assert now == set()


# --- modules ---------------------------------------------------------------------------------------------------------------


def dead_in_module(text):
    """Return what is dead in the code of a module when it asks for its first step."""
    found = []

    def steps():
        found.append(dead_in_modules(module_frames(script_frames())))
        yield 0

    variables = {"__name__": __name__, "steps": steps()}
    exec(compile(text, __file__, "exec"), variables)
    return found[0].get(id(variables))


LOOP = """
for step in steps:
    batch, loss = step, 1
    total = loss + batch
    print(total)
"""


def test_variables_of_a_module():
    assert dead_in_module(LOOP) == {"step", "batch", "loss", "total"}


def test_a_variable_that_a_module_reads_after_the_loop():
    assert dead_in_module(LOOP + "print(loss)") == {"step", "batch", "total"}


@pytest.mark.parametrize(
    "reader",
    [
        "def report():\n    return batch",
        "def report():\n    global batch\n    batch = 1",
        "class Report:\n    size = len([batch])",
        "def outer():\n    def inner():\n        return batch",
        "report = lambda: batch",
        "def report(data):\n    return data.query('@batch > 1')",
        "def report(module):\n    return module.batch",
    ],
)
def test_a_variable_that_a_function_of_the_module_names(reader):
    assert dead_in_module(f"batch = 0\n{reader}\n{LOOP}") == {"step", "loss", "total"}


@pytest.mark.parametrize("read", [*READS, "vars(__import__('sys'))"])
def test_a_function_of_the_module_that_reads_variables_by_name(read):
    assert dead_in_module(f"def report():\n    return {read}\n{LOOP}") == set()


def test_what_the_loop_does_not_assign():
    assert dead_in_module(f"limit = 3\n{LOOP}") == {"step", "batch", "loss", "total"}


def test_code_with_a_table_of_its_own():
    found = []

    def steps():
        found.append(dead_in_modules(module_frames(script_frames())))
        yield 0

    variables = {"__name__": __name__, "batch": 0}
    exec(compile(LOOP, __file__, "exec"), variables, {"steps": steps()})
    assert found == [{}]


def test_the_names_of_a_class_are_its_own():
    text = "class Training:\n" + LOOP.replace("\n", "\n    ")
    assert dead_in_module(text) == set()


def test_code_that_a_module_executes():
    text = f"batch = 0\nexec(compile({LOOP!r}, {__file__!r}, 'exec'))\nprint(batch)"
    assert dead_in_module(text) == set()


# --- random functions --------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d")


class Writer:
    """Writes a random loop as text: assignments, deletions, branches, loops, exceptions, context managers."""

    def __init__(self, dice):
        self.dice = dice
        self.lines = []

    def function(self):
        self.lines = ["def loop(steps, out, Swallows):"]
        self.lines += [f"    {name} = {at}" for at, name in enumerate(NAMES)]
        self.lines += ["    try:", "        for step in steps:", "            try:"]
        self.block(4, 4)
        self.lines += [
            "            except (NameError, ZeroDivisionError) as error:",
            "                out.append(type(error).__name__)",
            f"    except ValueError:\n        out.append({self.dice.choice(NAMES)})"
            if self.dice.random() < 0.5
            else "    finally:\n        pass",
        ]
        self.lines += [
            f"    try:\n        out.append({name})\n    except NameError:\n        pass" for name in NAMES[:2]
        ]
        return "\n".join(self.lines)

    def block(self, depth, most):
        for _ in range(self.dice.randint(1, most)):
            self.statement(depth)

    def statement(self, depth):
        one, other = self.dice.choices(NAMES, k=2)
        number = self.dice.randint(0, 3)
        simple = [
            f"{one} = step + {number}",
            f"{one} = {other}",
            f"{one}, {other} = {other}, {number}",
            f"{one} += {number}",
            f"del {one}",
            f"out.append({one})",
            f"out.append({one} // (step % {number + 1}))",
            f"out.append([{one} for {one} in range(2)])",
            f"out.append((lambda: {one})())" if self.dice.random() < 0.1 else f"out.append({other})",
            f"({one} := step)",
        ]
        nested = ["if", "while", "for", "try", "with", "finally", "match"]
        at = "    " * depth
        if depth > 6 or self.dice.random() < 0.6:
            self.lines.append(at + self.dice.choice(simple))
            return
        kind = self.dice.choice(nested)
        if kind == "if":
            self.lines.append(f"{at}if step % {number + 1}:")
            self.block(depth + 1, 3)
            if self.dice.random() < 0.5:
                self.lines.append(f"{at}else:")
                self.block(depth + 1, 3)
        elif kind in ("while", "for"):
            self.lines.append(f"{at}for {one} in range({number}):")
            self.block(depth + 1, 3)
            if self.dice.random() < 0.6:
                self.lines.append(
                    f"{at}    if step == {number}:\n{at}        {self.dice.choice(['break', 'continue'])}"
                )
            if kind == "while":
                self.lines.append(f"{at}else:")
                self.block(depth + 1, 2)
        elif kind == "match":
            self.lines.append(f"{at}match step:\n{at}    case {number}:")
            self.block(depth + 2, 2)
            self.lines.append(f"{at}    case {one}:")
            self.block(depth + 2, 2)
        else:
            self.lines.append(f"{at}with Swallows():" if kind == "with" else f"{at}try:")
            self.block(depth + 1, 3)
            if kind == "try":
                self.lines.append(f"{at}except (NameError, ZeroDivisionError):")
                self.block(depth + 1, 2)
            elif kind == "finally":
                self.lines.append(f"{at}finally:")
                self.block(depth + 1, 2)


class Swallows:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return True


class Poison:
    """In place of a dead variable. Nobody may see it."""


def run(source, *, poisoning):
    """Run a function. With `poisoning`, put other values into its dead variables whenever it asks for a step; count them."""
    names, out, count = {"__name__": __name__}, [], 0

    def steps():
        nonlocal count
        for step in range(5):
            frame = sys._getframe(1)
            dead = dead_variables(frame).intersection(NAMES, frame.f_locals) if poisoning else ()
            set_local_variables(frame, {name: Poison() for name in dead})
            count += len(dead)
            yield step
        raise ValueError

    exec(source, names)
    with suppress(ValueError, NameError):
        names["loop"](steps(), out, Swallows)
    return list(map(repr, out)), count


def run_module(source, *, poisoning):
    """The same with the code of the function as that of a module."""
    lines = [line.removeprefix("    ") for line in source.splitlines()[1:]]
    out, count = [], 0

    def steps():
        nonlocal count
        for step in range(5):
            dead = dead_in_modules(module_frames(script_frames())).get(id(names), ()) if poisoning else ()
            found = {name: Poison() for name in dead if name in NAMES and name in names}
            names.update(found)
            count += len(found)
            yield step
        raise ValueError

    names = {"__name__": __name__, "steps": steps(), "out": out, "Swallows": Swallows}
    with suppress(ValueError, NameError):
        exec(compile("\n".join(lines), __file__, "exec"), names)
    return list(map(repr, out)), count


@pytest.mark.parametrize("run_code", [run, run_module])
def test_random_code_does_not_see_its_dead_variables(run_code):
    seed, poisoned = random.randrange(1 << 32), 0
    dice = random.Random(seed)
    for _ in range(500):
        source = Writer(dice).function()
        expected, _ = run_code(source, poisoning=False)
        found, count = run_code(source, poisoning=True)
        assert found == expected, f"seed {seed}:\n{source}"
        poisoned += count
    assert poisoned > 100
