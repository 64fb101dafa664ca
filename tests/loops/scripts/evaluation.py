"""A script's module that carries state from step to step, and that no step needs at first."""

from items_variables import RATES

calls = 0
best = {"step": 0}


class Mean:
    """A running mean."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, value):
        self.total, self.count = self.total + value, self.count + 1
        return self.total / self.count


def counted(rates=[0.1]):  # noqa: B006 - as scripts do
    global calls  # noqa: PLW0603 - as scripts do
    calls += 1
    rates.append(rates[-1] / 2)
    return calls + rates[-1]


RATES["evaluation"] = 0.25
