"""Which variables of a running function are dead: assigned again before they are read, on every path."""

import random
import sys
from contextlib import suppress

import pytest

from deadpool_run.worker.process.frames import set_local_variables
from deadpool_run.worker.process.liveness import dead_variables


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

    assert dead_in(loop) == {"steps", "step", "inputs", "targets", "loss"}


def test_a_variable_that_is_read_after_the_loop():
    def loop(steps):
        for step in steps:
            loss = step
        return loss

    assert dead_in(loop) == {"steps", "step"}


def test_a_variable_that_one_path_does_not_assign():
    def loop(steps):
        best = worst = None
        for step in steps:
            if step > 0:
                best = step
            worst = step or worst
            print(best, worst)

    assert dead_in(loop) == {"steps", "step"}


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

    assert dead_in(loop) == {"steps", "step", "other"}


def test_an_exception_instead_of_the_next_step():
    def loop(steps):
        loss = other = None
        try:
            for step in steps:
                loss = other = step
                print(other)
        except ValueError:
            print(loss)

    assert dead_in(loop) == {"steps", "step", "other"}


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

    assert dead_in(loop) == {"steps", "step", "inside"}


def test_a_deleted_variable_has_to_be_there():
    def loop(steps):
        first = last = 0
        for step in steps:
            del first
            first = last = step
            del last
            last = first
            print(last)

    assert dead_in(loop) == {"steps", "step", "last"}


def test_a_variable_that_a_function_inside_shares():
    def loop(steps, given=0):
        shared = own = 0

        def read():
            return shared, given

        for step in steps:
            given = shared = own = step
            print(read(), own)

    assert dead_in(loop) == {"steps", "step", "own"}


def test_a_comprehension_with_the_same_name():
    def loop(steps):
        each = kept = 0
        for step in steps:
            kept = [each + 1 for each in range(step)]
            print(kept)
        return each

    assert "each" not in dead_in(loop)


@pytest.mark.parametrize("name", ["locals", "vars", "eval", "exec", "dir"])
def test_nothing_is_dead_where_variables_are_read_by_name(name):
    def loop(steps):
        for step in steps:
            loss = step
            print(loss)

    assert "loss" in dead_in(loop)
    loop.__code__ = loop.__code__.replace(co_names=(*loop.__code__.co_names, name))
    assert dead_in(loop) == set()


def test_a_variable_that_a_text_names():
    def loop(steps):
        frame = None
        for step in steps:
            print(frame, "price > @limit")
            limit = lower = step
            print(limit, lower)

    assert dead_in(loop) == {"steps", "step", "lower"}


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
    exec(source, names)

    def steps():
        nonlocal count
        for step in range(5):
            frame = sys._getframe(1)
            dead = dead_variables(frame).intersection(NAMES, frame.f_locals) if poisoning else ()
            set_local_variables(frame, {name: Poison() for name in dead})
            count += len(dead)
            yield step
        raise ValueError

    with suppress(ValueError, NameError):
        names["loop"](steps(), out, Swallows)
    return list(map(repr, out)), count


def test_random_functions_do_not_see_their_dead_variables():
    seed, poisoned = random.randrange(1 << 32), 0
    dice = random.Random(seed)
    for _ in range(500):
        source = Writer(dice).function()
        expected, _ = run(source, poisoning=False)
        found, count = run(source, poisoning=True)
        assert found == expected, f"seed {seed}:\n{source}"
        poisoned += count
    assert poisoned > 100
