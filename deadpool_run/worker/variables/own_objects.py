"""Objects of the script's own classes: their attributes, read and set without running code of those classes."""

import enum
from argparse import Namespace
from collections import deque
from collections.abc import Collection, Mapping
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_WITH_OTHER_STATE = (
    nn.Module,
    Optimizer,
    Tensor,
    BaseException,
    enum.Enum,
    type,
    dict,
    list,
    tuple,
    set,
    frozenset,
    deque,
    str,
    bytes,
    int,
    float,
)


def is_own(kind: type, modules: Collection[str]) -> bool:
    """Return whether a class is of one of these modules, and all state of its objects is in attributes."""
    return kind in (Namespace, SimpleNamespace) or (
        kind.__module__ in modules
        and not issubclass(kind, _WITH_OTHER_STATE)
        and kind.__reduce_ex__ is object.__reduce_ex__
    )


def set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Set attributes of an object, also those in slots and those of frozen data classes."""
    for name, each in attributes.items():
        found = next((vars(base)[name] for base in type(value).__mro__ if name in vars(base)), None)
        if isinstance(found, MemberDescriptorType):
            object.__setattr__(value, name, each)
        else:
            vars(value)[name] = each
