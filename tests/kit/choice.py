"""The cases of a matrix that `make test` runs. `make test-long` runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def often(values: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """Return the values as parameters, marked as slow unless they are usual. A tuple is one set of parameters."""
    return [
        value
        if value in usual
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
