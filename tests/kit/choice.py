"""Which cases of a matrix `make test` runs; `make test-long` runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def often(values: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """Return the values as parameters, those that are not usual marked as slow. A tuple is one set of parameters."""
    return [
        value
        if value in usual
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
