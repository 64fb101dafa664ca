"""A table of kinds of state: functions that change something in each step and return a number, by which a weight of their own changes."""

KINDS = {}


def kind(function):
    """Add a kind. The function is called with the run: its model, optimizer, schedule and step."""
    KINDS[function.__name__] = function
    return function
