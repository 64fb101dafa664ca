"""Modules in variables: which of their attributes and buffers are variables too."""

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from deadpool_run.worker.compat.modules import buffers_of

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its tables of parameters, buffers, children and hooks, and its mode."""


def is_own_module(module: nn.Module, own: Collection[str]) -> bool:
    """Return whether a class of the module is in one of the script's modules."""
    return any(kind.__module__ in own for kind in type(module).__mro__)


def has_variables(module: nn.Module, own: Collection[str]) -> bool:
    """Return whether attributes of a module may be variables: it is the script's, or a metric of a library."""
    is_of_torch = type(module).__module__.partition(".")[0] == "torch"
    return is_own_module(module, own) or not (is_of_torch or _is_trained(module))


def variable_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table of a module's own buffers if they are variables: if nothing in the module can be trained."""
    found = buffers_of(module)
    return {} if found and _is_trained(module) else found


def _is_trained(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def parts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those in it, each once, by path: `.layers.0` is in `.layers`."""
    return ((f".{path}" if path else "", each) for path, each in module.named_modules())
