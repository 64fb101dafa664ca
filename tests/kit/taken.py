"""A container that snapshots leave alone, for what a test keeps from process to process."""


class Taken(list):
    """A list that snapshots do not keep, because its class has slots."""

    __slots__ = ()
