"""Settings that a script runs from this file."""


class Part:
    """A part of the settings."""

    def __init__(self):
        self.seen = []


rate, part = 1.0, Part()
