"""Encoder of objects by their attributes: the script's, modules, those of libraries and of containers that derive from Python's."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any
from weakref import ReferenceType

from torch import nn

from deadpool_run.worker.codec import attributes_of, class_of_name
from deadpool_run.worker.state.numbered import MadeLater
from deadpool_run.worker.variables.values.kinds import library_values, queues
from deadpool_run.worker.variables.values.kinds.own_objects import (
    attributes_of_container,
    attributes_of_module,
    container_of,
    content_of,
    immutable_base_of,
    is_own,
    is_plain_of_library,
    may_be_made,
    plain_value,
)
from deadpool_run.worker.variables.values.objects import (
    MadeLaterError,
    Objects,
    OpaqueError,
    UnkeptDataError,
)


class ObjectWriter(ABC):
    """Writes objects. A `ValueWriter` writes what is in them."""

    def __init__(
        self, objects: Objects | None, references: Objects, own: Collection[str], made_later: MadeLater | None
    ) -> None:
        """Take arguments of `ValueWriter`."""
        self._objects = objects
        self._references = references
        self._own = own
        self._made_later = made_later
        self._in_module = False
        self._must_be_whole = False
        """Whether a part that cannot be kept may not be written by its name, either."""

    @abstractmethod
    def _write(self, value: Any) -> Any:
        """Return the node of a value. Raises `OpaqueError`."""

    @abstractmethod
    def _all(self, values: Iterable[Any]) -> list[Any]:
        """Return the nodes of parts. Raises `OpaqueError`."""

    @abstractmethod
    def _container(self, kind: Any, value: Any, *columns: Iterable[Any]) -> list[Any]:
        """Return the node of a container of class `kind`."""

    def _object(self, kind: type, value: Any) -> Any:  # noqa: PLR0911 - one line for each kind
        """Return the node of an object; None if this writer has none for its class."""
        if is_own(kind, self._own) and may_be_made(kind):
            attributes = content_of(value)
            return ["object", *self._class(kind), list(attributes), self._all(attributes.values())]
        if self._made_later is not None and issubclass(kind, nn.Module):
            return self._module(kind, value)
        if self._is_new(value) and kind is ReferenceType:
            return self._weak(value)
        if is_plain_of_library(kind) and self._is_new(value):
            return self._object_of_library(kind, value)
        if (base := container_of(kind, self._own, libraries=True)) is not None and self._is_container_kept(kind, value):
            return self._own_container(kind, base, value)
        if (base := immutable_base_of(kind, self._own)) is not None:
            attributes = attributes_of(value)
            own = [*self._class(kind), list(attributes), self._all(attributes.values())]
            return ["own value", *own, self._write(plain_value(base, value))]
        if queues.is_kept(value):
            *parts, content = queues.parts_of(value)
            return ["queue", *parts, self._all(content)]
        return self._of_library(value) if library_values.is_kept(value) else None

    def _weak(self, reference: Any) -> list[Any]:
        """Return the node of a weak reference to an object that this process has by another way."""
        target = reference()
        callback: Any = reference.__callback__
        if callback is not None or not (target is None or self._is_held(target)):
            raise OpaqueError
        return ["weak", self._write(target)]

    @abstractmethod
    def _is_held(self, value: Any) -> bool:
        """Return whether something else in the snapshot, or in every process, refers to an object."""

    def _is_new(self, value: Any) -> bool:
        """Return whether an object was made after the loop began. False if that makes no difference to this writer."""
        return self._made_later is not None and (self._objects is None or self._objects.name_of(value) is None)

    def _is_container_kept(self, kind: type, value: Any) -> bool:
        """Return whether a container is the script's, new, or had only values in set-up. Others belong to a library."""
        return kind.__module__ in self._own or self._is_new(value) or self._had_only_values(value)

    @abstractmethod
    def _had_only_values(self, value: Any) -> bool:
        """Return whether an object of set-up had only values when it was written first."""

    def _kept_whole(self, values: Iterable[Any]) -> list[Any]:
        """Return the nodes of parts. Raises `OpaqueError` if one of them cannot be kept."""
        before, self._must_be_whole = self._must_be_whole, True
        try:
            return self._all(values)
        finally:
            self._must_be_whole = before

    def _class(self, kind: type) -> tuple[str, str]:
        """Return the Python module of a class and its name there; no module, and its name as a reference, for a local class."""
        if class_of_name(kind.__module__, kind.__qualname__) is kind or not (name := self._references.name_of(kind)):
            return kind.__module__, kind.__qualname__
        return "", name

    def _module(self, kind: type, value: Any) -> list[Any]:
        assert self._made_later is not None
        attributes, is_inside, self._in_module = attributes_of_module(value), self._in_module, True
        number = 0 if is_inside else self._made_later.weakly.number(value)
        try:
            return ["module", *self._class(kind), list(attributes), self._all(attributes.values()), number]
        finally:
            self._in_module = is_inside

    def _object_of_library(self, kind: type, value: Any) -> list[Any]:
        """Return the node of an object that is nothing but values and references. Raises `OpaqueError` if it has anything else."""
        assert self._made_later is not None
        if self._made_later.opaque.has(value) or class_of_name(*self._class(kind)) is not kind:
            raise OpaqueError
        try:
            attributes = attributes_of(value)
            nodes = self._kept_whole(attributes.values())
        except UnkeptDataError:
            raise
        except (OpaqueError, RuntimeError) as error:  # the latter if another thread has added an attribute
            if isinstance(error, MadeLaterError) and kind.__module__.startswith("torch."):  # a schedule, say
                raise
            self._made_later.opaque.number(value)  # it is a replacement's own
            raise OpaqueError from error
        return ["object", *self._class(kind), list(attributes), nodes, self._made_later.values.number(value)]

    def _own_container(self, kind: type, base: Any, value: Any) -> list[Any]:
        columns = [base.keys(value), base.values(value)] if issubclass(base, dict) else [list(base.__iter__(value))]
        attributes = attributes_of_container(value)
        own = [*self._class(kind), list(attributes), self._all(attributes.values())]
        return ["own container", *own, self._container(base, value, *columns)]

    def _of_library(self, value: Any) -> list[Any]:
        tag, *parts, arguments = library_values.parts_of(value)
        return [tag, *parts, self._all(arguments)]
