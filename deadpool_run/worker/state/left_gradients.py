"""Gradients that an update has used and that stay in place: the next step may read them before it overwrites them.

A loop that zeroes gradients before each backward leaves them at the end of each step. They are as large as the weights, and
hardly any loop reads them, so a snapshot does not hold them. In the first steps, and later in some, the library looks whether
they are zeros, which need no memory. A mark on each of the others shows whether the script reads it. If it does, snapshots hold
all gradients from then on. After a restore, each gradient that the snapshot lacks becomes a stand-in: the script may overwrite
it, and is refused if it uses it.

A mark is a subclass of the tensor's class, which torch asks before each operation. A hook of the parameter shows that a backward adds to
its gradient: so does one through the discriminator of a GAN that is zeroed only later in the step.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from deadpool_run.errors import RefusedError
from deadpool_run.worker.compat.modules import local, writes_of

_FIRST_STEPS = 128
"""In these steps all left gradients are watched; later only at powers of two."""
_OVERWRITING = frozenset({"zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_", "_fused_zero_"})
"""Functions that set all elements of their first argument, and read none of it."""
_ALIASING = frozenset({"data", "detach"})
"""Functions that return the same memory."""
_HARMLESS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "data_ptr", "element_size"),
        *("is_contiguous", "is_inference", "is_floating_point", "is_complex", "get_device", "__len__", "__hash__"),
        *("_is_view", "detach_", "requires_grad_"),
    }
)
"""Functions that read no element."""
_READING = frozenset({"T", "H", "mT", "mH", "real", "imag"})
"""Attributes that are views. Others, such as the shape, read no element."""
_ABOVE = 4
"""Depth of the search for tensors in the arguments of a function."""


def is_watched(step: int) -> bool:
    """Return whether the script's use of left gradients is noticed in this step."""
    return step <= _FIRST_STEPS or step & (step - 1) == 0


class _Mark(NamedTuple):
    """The class that a marked gradient had, and what happens if the script uses it."""

    kind: type[Tensor]
    use: Callable[[], None]
    """Raises for a stand-in."""
    is_lost: bool = False
    """It is a stand-in."""
    source: Tensor | None = None
    """The marked gradient with the same memory, of an alias of one."""


class _Marked:
    """The part of a marked gradient's class that torch asks."""

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and note what it does to the marked tensors in its arguments."""
        kwargs = kwargs or {}
        marked = list(_marked_in((args, kwargs), _ABOVE))
        name, is_attribute = _name_of(function)
        if name in _HARMLESS or (is_attribute == "get" and name not in _ALIASING | _READING):
            with _unmarked(marked):
                return function(*args, **kwargs)
        if name in _ALIASING and is_attribute != "set":
            (source,) = marked
            with _unmarked(marked):
                found: Tensor = function(*args, **kwargs)
            _mark(found, _mark_of(source)._replace(source=source))
            return found
        overwritten = []
        if name in _OVERWRITING or is_attribute == "set":
            overwritten, marked = marked, list(_marked_in((args[1:], kwargs), _ABOVE))
        for gradient in marked:
            # The first use of one may take the marks from all.
            if is_marked(gradient) and not _is_set_again(gradient):
                _mark_of(gradient).use()
        for gradient in (*marked, *overwritten):
            _unmark(gradient)
        return function(*args, **kwargs)


class _Distributed(_Marked):
    """The same for methods of a DTensor of which torch does not ask."""

    def to_local(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the shard on this rank."""
        return _used(self).to_local(*args, **kwargs)

    def full_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the whole tensor."""
        return _used(self).full_tensor(*args, **kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return a tensor with other placements."""
        return _used(self).redistribute(*args, **kwargs)


def _used(gradient: Any) -> DTensor:
    _mark_of(gradient).use()
    _unmark(gradient)
    found: DTensor = gradient
    return found


_KINDS = {
    kind: cast("type[Tensor]", type("LeftGradient", (asked, kind), {"__slots__": ()}))
    for kind, asked in {Tensor: _Marked, DTensor: _Distributed}.items()
}
"""The class of a marked tensor, by its own."""


class LeftGradients:
    """The marks on gradients that no snapshot holds. For the main thread."""

    def __init__(self) -> None:
        self.are_kept = False
        """Whether the script uses left gradients: then snapshots hold all gradients."""
        self.refuse: Callable[[str], NoReturn] = _raise_refused
        self._nonzero: set[int] = set()
        """The identities of parameters whose gradients were left with other values than zeros."""
        self._known: set[int] = set()
        """The identities of parameters whose left gradients were looked at."""
        self._watched: list[tuple[Tensor, weakref.ref[Tensor], int]] = []
        """Parameters with marked gradients, and how often those had been written to."""
        self._hooks: list[RemovableHandle] = []
        """Hooks of these parameters, which a backward calls before it adds to their gradients."""
        self._copied = False
        self._copies: dict[int, Tensor] = {}
        """Gradients that the first run of a trial has used, by parameter."""

    def learn(self, parameters: Iterable[Tensor], *, again: bool) -> None:
        """Note which of these parameters' gradients are not zeros. A loop may zero them in place at the end of each step.

        With `again`, look also at those that were zeros before.
        """
        known = self._nonzero if again else self._known
        unknown = [each for each in parameters if id(each) not in known and _is_plain(each.grad)]
        self._known.update(map(id, unknown))
        if unknown:
            found = [local(each.grad).any() for each in unknown if each.grad is not None]
            flags = torch.stack([each.to(found[0].device) for each in found]).tolist()
            self._nonzero.update(id(each) for each, is_nonzero in zip(unknown, flags, strict=True) if is_nonzero)

    def is_lost(self, parameter: Tensor) -> bool:
        """Return whether a snapshot that does not hold a parameter's gradient lacks a value: that of a stand-in, or not zeros."""
        return id(parameter) in self._nonzero or is_stand_in(parameter)

    def zero(self, gradient: Tensor) -> None:
        """Set a gradient to zeros."""
        _unmark(gradient)
        gradient.zero_()

    def watch(self, parameters: Iterable[Tensor], *, copying: bool) -> None:
        """Mark the gradients of these parameters for one step. `copying`: the step is a trial's first run, and begins again."""
        self.unwatch()
        self._copied = copying
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and _is_plain(gradient):
                self._watched.append((parameter, weakref.ref(gradient), _writes(gradient)))
                if (
                    type(gradient) is Tensor and parameter.requires_grad
                ):  # FSDP2 adds to a DTensor, after it has reduced
                    self._hooks.append(parameter.register_hook(partial(self._before_addition, parameter)))
                _mark(gradient, _Mark(type(gradient), self._note))

    def unwatch(self) -> None:
        """Take away the marks, except those of stand-ins."""
        for _, reference, _ in self._watched:
            gradient = reference()
            if gradient is not None and is_marked(gradient):
                _unmark(gradient)
        for hook in self._hooks:
            hook.remove()
        self._watched, self._hooks = [], []

    def note_update(self, parameters: Iterable[Tensor]) -> None:
        """Note that the gradients of these parameters are used, as they are now. A stand-in may have been overwritten meanwhile.

        Torch does not ask when a script writes through another tensor with the same memory, such as a flat buffer.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and is_marked(gradient):
                if not _is_set_again(gradient):
                    _mark_of(gradient).use()
                _unmark(gradient)

    def lose(self, parameter: Tensor, name: str) -> None:
        """Make a stand-in of the present gradient, which the snapshot lacks. It is no number until the script overwrites it."""
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter).detach()
        _unmark(gradient)
        if (copy := self._copies.get(id(parameter))) is not None:
            gradient.copy_(copy)
        elif _is_plain(gradient):
            local(gradient).fill_(float("nan"))
            _mark(gradient, _Mark(type(gradient), lambda: self._refuse_lost(name), is_lost=True))
            self._nonzero.add(id(parameter))
            self._known.add(id(parameter))
        else:
            gradient.zero_()

    def forget_copies(self) -> None:
        """Drop the copies: they have been put back, or never will be."""
        self._copies = {}

    def _before_addition(self, parameter: Tensor, _: Tensor) -> None:
        """Note that a backward is about to add to a marked gradient. Torch does not ask then. Stand-ins are looked at when they are used."""
        gradient = parameter.grad
        if gradient is not None and is_marked(gradient) and not _mark_of(gradient).is_lost:
            _mark_of(gradient).use()

    def _note(self) -> None:
        self.are_kept = True
        watched = [(parameter, reference(), writes) for parameter, reference, writes in self._watched]
        self.unwatch()
        for parameter, gradient, writes in watched:
            if self._copied and gradient is not None and gradient is parameter.grad and _writes(gradient) == writes:
                self._copies[id(parameter)] = gradient.detach().clone()

    def _refuse_lost(self, name: str) -> NoReturn:
        self.refuse(
            f"the gradient of {name} is used in a step that has not set it, and snapshots do not keep gradients that an update has "
            "used: a replacement for a lost rank, and a rank that repeats a step, would not have it.\n"
            "Call optimizer.zero_grad() at the end of each step, and keep what the next step needs in a variable "
            "(parameter.grad.clone())."
        )


def is_stand_in(parameter: Tensor) -> bool:
    """Return whether a parameter has a stand-in for its gradient, outside of a step that is watched."""
    return parameter.grad is not None and is_marked(parameter.grad)


def is_marked(gradient: Tensor) -> bool:
    """Return whether a gradient has a mark. Cheap."""
    return issubclass(type(gradient), _Marked)


def _raise_refused(why: str) -> NoReturn:
    raise RefusedError(why)


def _is_plain(gradient: Tensor | None) -> bool:
    """Return whether a gradient can be marked."""
    return type(gradient) in _KINDS and gradient is not None and gradient.layout is torch.strided


def _mark(gradient: Tensor, mark: _Mark) -> None:
    vars(gradient)["_left"] = mark
    gradient.__class__ = _KINDS[mark.kind]


def _mark_of(gradient: Tensor) -> _Mark:
    found: _Mark = vars(gradient)["_left"]
    return found


def _is_set_again(gradient: Tensor) -> bool:
    """Return whether a stand-in has other values since: a backward sets DDP's view of a bucket without a word to Python."""
    if not _mark_of(gradient).is_lost:
        return False
    with _unmarked([gradient]):
        return not local(gradient).isnan().any()


def _unmark(gradient: Tensor) -> None:
    if is_marked(gradient):
        mark: _Mark = vars(gradient).pop("_left")
        gradient.__class__ = mark.kind
        if mark.source is not None:
            _unmark(mark.source)


@contextmanager
def _unmarked(gradients: Iterable[Tensor]) -> Iterator[None]:
    marks = [(each, _mark_of(each)) for each in gradients]
    for gradient, mark in marks:
        gradient.__class__ = mark.kind
    try:
        yield
    finally:
        for gradient, mark in marks:
            gradient.__class__ = _KINDS[mark.kind]


def _marked_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if is_marked(value):
            yield value
    elif depth and isinstance(value, (list, tuple)):
        for part in value:
            yield from _marked_in(part, depth - 1)
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from _marked_in(part, depth - 1)


def _name_of(function: Any) -> tuple[str, str]:
    """Return the name of a function of torch, or of an attribute with "get" or "set"."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(function.__self__, "__name__", ""), name.strip("_")
    return name, ""


def _writes(gradient: Tensor) -> int:
    return writes_of(local(gradient))
