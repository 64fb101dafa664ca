"""The script's own variables that change in its step loop: part of each snapshot, restored before a step is repeated.

Scripts carry state from step to step in variables: counters, averages, lists of losses, generators. A replacement runs set-up
again, which gives variables the values that they had when the loop began. A snapshot has the differences from these.
"""

import secrets
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import msgspec
from torch import Tensor, nn

from deadpool_run.worker.process.frames import note_loop
from deadpool_run.worker.state.state_tensors import StateTensors
from deadpool_run.worker.variables import references
from deadpool_run.worker.variables.baseline import DEAD, GONE, LOST, OPAQUE, UNKEPT, Baseline, First, is_lost
from deadpool_run.worker.variables.children import shown
from deadpool_run.worker.variables.first_values import FirstValues, Name, counts_of, facts_of, shown_variable
from deadpool_run.worker.variables.late_modules import LateModules
from deadpool_run.worker.variables.left_alone import Unwritten, digests_of_unwritten, progress_here, progress_of_made
from deadpool_run.worker.variables.references import References
from deadpool_run.worker.variables.scope import Scope, ScopeMark
from deadpool_run.worker.variables.scopes import Scopes
from deadpool_run.worker.variables.unchanged import may_be_dropped
from deadpool_run.worker.variables.values.digests import Looks
from deadpool_run.worker.variables.values.lost import ASSIGNED, MADE_LATER, SHARED, LostValue, kept_back, raise_refused
from deadpool_run.worker.variables.values.objects import MadeLaterError, Objects, OpaqueError, UnkeptDataError
from deadpool_run.worker.variables.values.reader import ValueReader
from deadpool_run.worker.variables.values.shared_memory import SharedMappings
from deadpool_run.worker.variables.values.tensors import TensorCopies, TensorCopy, larger_tensors_of
from deadpool_run.worker.variables.values.unkept import Unkept
from deadpool_run.worker.variables.values.writer import ValueWriter, encoded

_REPLACED = "replaced modules"
"""Not a scope: the places in modules that have another one."""
_IMPORTED = "imported modules"
"""Not a scope: the names of the modules that were imported after the loop began."""
_LEFT_ALONE = "left alone"
"""Not a scope: objects that snapshots do not keep and that have changed, with their progress."""

Changed = dict[str, dict[str, Any]]
"""Nodes by scope and variable."""


class Variables:
    """The script's variables: their values when its loop began, and now. For the main thread, in the loop."""

    def __init__(self, state: StateTensors | None = None, shared: SharedMappings | None = None) -> None:
        """`state` has the tensors of optimizers, which variables may share. `shared` is the memory that other ranks share."""
        self._state = state or StateTensors(list)
        self._scopes: Scopes | None = None
        self._objects = Objects()
        self._references = References()
        self._looks = Looks()
        self._baseline = Baseline(self._writer, self.keeps)
        self.first = FirstValues()
        self._late: LateModules | None = None
        self._copies, self._shared = TensorCopies(), shared or SharedMappings()
        self._moved: set[Name] = set()
        """Variables with data that was not kept when the loop began, and has changed since."""
        self._unkept: dict[Name, Unkept] = {}
        """Variables with data that the last snapshot does not hold, with records of their values at that time."""
        self._earlier: dict[Name, Unkept] = {}
        """The same for the snapshot before the last."""
        self._around: dict[str, str] = {}
        """Containers and objects of the script with a part that no snapshot holds."""
        self._taken, self._number = 0, 0
        self._reported: set[Name] = set()
        self.too_large: dict[str, str] = {}
        """Changing variables that cannot be kept, each once, with the reason. The caller reports and clears them."""
        self.left_alone: list[str] = []
        """Objects that the last restore left alone and that are not as in the process of the snapshot. A replacement reports them."""
        self.refuse = raise_refused
        """Called with a message when the script uses a value that was lost. Raises."""
        self.trying = False
        """During the trial: no value is lost yet, and `put_back` later restores those that `put` replaces."""

    def begin(
        self,
        protected: Iterable[object] = (),
        parts: Iterable[tuple[str, Any]] = (),
        others: Iterable[Tensor] = (),
    ) -> None:
        """Find the variables; the loop begins.

        `protected` and `others`, and tensors that share memory with these, are kept by other means. `parts` are the modules
        and parameters in `protected`, by name.
        """
        note_loop()
        self._scopes = Scopes(protected, parts)
        self._objects = Objects()
        self._copies = TensorCopies(others)
        self._shared.look(thorough=True)
        self._references.begin(self._scopes, self._writer().write)
        self._baseline = Baseline(self._writer, self.keeps)
        self._baseline.note(self._scopes, self._scopes.modules)
        self._objects.add_others(self._scopes.parameters)
        self._late = LateModules(self._imported)
        self._copies.begun()

    def facts(self) -> dict[str, Any]:
        """Return what has to be the same in a replacement when its loop begins, as JSON."""
        return facts_of(self._baseline.all())

    def rehearsed(self) -> None:
        """Note what the first steps have made: a replacement makes it in its rehearsal."""
        if self._scopes is not None:
            self._references.rehearsed(self._scopes, self._writer(late=True).write)

    def take(self) -> dict[str, Any]:
        """Return the variables that differ from when the loop began, as bytes and large tensors."""
        if self._scopes is None or self._late is None:
            return {}
        self._late.note_waiting()
        self._taken += 1
        thorough = self._taken & (self._taken - 1) == 0
        if thorough:  # optimizers make their state in the first steps
            self._state.forget()
        self._copies.next(thorough=thorough)
        self._shared.look(thorough=thorough and self._taken > 1)
        self._unkept, self._earlier, self._number = {}, self._unkept, secrets.randbits(62)
        self._around = {}
        self._references.next()
        self._looks.next()
        found: Changed = {}
        writer = self._writer(late=True)
        for scope in self._scopes.changing():
            now, dead = scope.without_dead()
            changed: dict[str, Any] = {
                name: node
                for name, value, first in self._baseline.maybe_changed(scope.name, now)
                if (node := self._changed(writer, (scope.name, name), value, first, thorough=thorough)) is not None
            }
            changed |= dict.fromkeys(self._baseline.gone(scope.name, now), GONE) | dict.fromkeys(dead, DEAD)
            if changed:
                found[scope.name] = changed
        if replaced := self._scopes.children.take():
            found[_REPLACED] = replaced
            for path in replaced:
                why = "it was put in place of another one, and not created in set-up"
                self.report_unkept(f"the module {shown(path)}", why)
        if left_alone := self._advanced() | self._around:
            found[_LEFT_ALONE] = left_alone
        if self._late.names:
            found[_IMPORTED] = dict.fromkeys(self._late.names)
        large: list[Tensor] = []

        def numbered(copy: TensorCopy) -> int:
            large.append(copy.tensor)
            return len(large) - 1

        return {"of the script": encoded(found, numbered), "large": large}

    def report_unkept(self, what: str, why: str) -> None:
        """Have the caller of `too_large` report this once."""
        if ("", what) not in self._reported:
            self._reported.add(("", what))
            self.too_large[what] = why

    def own_modules(self) -> frozenset[str]:
        """Return the names of the script's Python modules, as the loop began."""
        return frozenset() if self._scopes is None else self._scopes.modules

    def put(self, taken: Mapping[str, Any]) -> None:
        """Set the variables to what `take` returned, here or in another process of the rank."""
        if self._scopes is None or self._late is None or not taken.get("of the script"):
            return
        self.put_back()
        changed: Changed = msgspec.msgpack.decode(taken["of the script"])
        imported = changed.pop(_IMPORTED, {})
        if why := self._late.bring([*imported]):
            self.refuse(
                f"a module that the script imported after its first step cannot be imported here: {why}.\nImport it before the loop."
            )
        left_alone = changed.pop(_LEFT_ALONE, {})
        self.first.restored(changed)
        if not self.trying:
            here = progress_here(self._shown(), left_alone) | self._advanced()
            self.left_alone = [name for name, progress in left_alone.items() if here.get(name) != progress]
        else:
            self._baseline.forget_results(self._scopes.of_names(self._baseline.with_left_alone()))
        self._scopes.children.put(changed.pop(_REPLACED, {}), self.refuse)
        reader = ValueReader(
            self._objects,
            self._scopes.objects.get,
            reference=self._references.named.get,
            state=self._state.named,
            made_later=self._references.made_later,
            own=self._scopes.modules,
            large=taken.get("large", ()),
            refuse=self.refuse,
        )
        kept = {scope.name: scope.all() for scope in self._scopes} if self.trying else {}
        # All of them first, in the order in which they were written.
        values = {scope: self._read_all(reader, scope, nodes, kept.get(scope, {})) for scope, nodes in changed.items()}
        for scope in self._scopes:
            nodes = changed.get(scope.name, {})
            now = scope.all()
            wanted = (
                self._unchanged(reader, scope, nodes, now)
                | self.first.stand_ins(scope.name, now.keys() - nodes.keys(), self.refuse)
                | values.get(scope.name, {})
                | self._lost(scope, nodes, now)
            )
            wanted = {name: value for name, value in wanted.items() if name not in now or now[name] is not value}
            if wanted:
                scope.write(wanted)
            if scope.remove is not None:
                gone = {name for name, node in nodes.items() if node == GONE}
                known = self._baseline.of(scope.name).keys() | self._baseline.code_of(scope.name).keys() | nodes.keys()
                for name in scope.read().keys() - (known - gone):
                    scope.remove(name)
        if (undone := self._late.undo(imported)) is not None:
            self._scopes.remove_modules(*undone)

    def put_back(self) -> None:
        """Put back the values that `put` replaced while `trying`, unless the script has assigned others."""
        for scope in self._scopes or ():
            lost = {name: value for name, value in scope.read().items() if type(value) is LostValue}
            wanted = {name: kept for name, value in lost.items() if (kept := kept_back(value)) is not None}
            if wanted:
                scope.write(wanted)

    def keeps(self, obj: object) -> bool:
        """Return whether the content of an object is among the variables, or is kept by other means."""
        return self._scopes is not None and self._scopes.is_scope(obj)

    def counts(self) -> dict[str, int]:
        """Return the small whole numbers in variables, by name."""
        return counts_of((scope.name, scope.read()) for scope in self._scopes or ())

    def left_out(self) -> dict[str, Unwritten]:
        """Return digests of the objects and iterators in variables that snapshots do not keep, by name and class. Slow."""
        return digests_of_unwritten(self._shown(), self._writer, self.keeps)

    def _shown(self) -> Iterator[tuple[str, Any]]:
        for scope in self._scopes or ():
            yield from ((shown_variable(scope.name, name), value) for name, value in scope.read().items())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the larger tensors in variables, by name, except those that require gradients."""
        for scope in self._scopes or ():
            for name, value in scope.read().items():
                for part, tensor in () if self.keeps(value) else larger_tensors_of(value):
                    yield shown_variable(scope.name, f"{name}{part}"), tensor

    def _advanced(self) -> dict[str, str]:
        assert self._scopes is not None
        return {
            shown_variable(scope.name, name): progress
            for scope in self._scopes.of_names(self._baseline.with_left_alone())
            for name, progress in self._baseline.advanced(scope)
        }

    def _imported(self, name: str, module: ModuleType) -> ScopeMark:
        """Add the variables of a module of the script that was imported just now. Return a mark before them."""
        assert self._scopes is not None
        mark = self._scopes.add_module(name, module)
        scopes = self._scopes.since(mark)
        self._references.add(scopes, self._writer().write)
        self._baseline.note(scopes, self._scopes.modules, late=True)
        return mark

    def _writer(self, noting: str = "", *, late: bool = False) -> ValueWriter:
        assert self._scopes is not None
        scopes = self._scopes
        return ValueWriter(
            self._objects,
            scopes.objects,
            scopes.modules,
            references=self._references.named,
            copies=self._copies,
            state=None if noting else self._state,
            noting=noting,
            made_later=self._references.made_later if late else None,
            shared=self._shared,
        )

    def _changed(self, writer: ValueWriter, name: Name, value: Any, first: First | None, *, thorough: bool) -> Any:
        """Return the node of a variable; None if it is as it was at first, here and in another process."""
        if first is not None and first.node is UNKEPT:
            kept: Unkept = first.value
            may_be_still = name not in self._moved and not kept.has_unknown_progress
            if may_be_still and kept.is_still(value, inside=self._looks.may(kept.cost), thorough=thorough):
                return None
            self._moved.add(name)
        try:
            node = writer.write(value)
        except OpaqueError as error:
            is_data = isinstance(error, UnkeptDataError) and not isinstance(value, nn.Module)
            was_empty = first is None or first.node is None
            if not is_data and (later := self._references.later(name, value, was_empty=was_empty)) is not None:
                node, is_carried = later
                if is_carried:
                    self._report(name, MADE_LATER)
                return node
            if isinstance(error, (UnkeptDataError, MadeLaterError)):
                self._note_unkept(name, value, first, str(error))
                return [LOST, str(error), self._number]
            if first is not None and first.node is OPAQUE and first.value is None:
                return None
            if progress := progress_of_made(value, self.own_modules()):
                self._around[shown_variable(*name)] = progress
            return OPAQUE
        is_as_first = first is not None and not self._baseline.is_late(name[0]) and encoded(node) == first.encoded
        return None if is_as_first else node

    def _note_unkept(self, name: Name, value: Any, first: First | None, why: str) -> None:
        earlier = self._earlier.get(name)
        now = Unkept(value, why, inside=self._looks.may(0 if earlier is None else earlier.cost))
        self._unkept[name] = now
        # A generator may look alike whenever it yields, but not like one that has not begun.
        if earlier is None and first is not None and first.node is UNKEPT and first.value.is_iterator:
            earlier = first.value
        if earlier is None or not earlier.is_of(value):
            return
        if earlier.differs_inside(now) or not earlier.is_still(value):
            self._report(name, why)

    def _report(self, name: Name, why: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self.too_large[shown_variable(*name)] = why

    def _stand_in(self, name: Name, why: str, kept: Any) -> LostValue:
        return LostValue(shown_variable(*name), why, self.refuse, kept)

    def _read_all(
        self, reader: ValueReader, scope: str, nodes: dict[str, Any], kept: Mapping[str, Any]
    ) -> dict[str, Any]:
        found = {}
        for name, node in nodes.items():
            if node in (OPAQUE, GONE, DEAD) or is_lost(node):
                continue
            if references.is_made_later(node):
                later = self._references.of_node(node)
                found[name] = self._stand_in((scope, name), MADE_LATER, kept.get(name)) if later is None else later
                continue
            try:
                found[name] = reader.read(node)
            except (OpaqueError, KeyError):
                why = "it has a function, a class or another object that was made after the loop had begun"
                found[name] = self._stand_in((scope, name), why, kept.get(name))
        return found

    def _lost(self, scope: Scope, nodes: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """Return stand-ins for data that the snapshot lacks and that this process does not have unchanged, and for dead variables."""
        found = {}
        for name, node in nodes.items():
            kept = now.get(name) if self.trying else None
            if node == DEAD and may_be_dropped(now.get(name)):
                found[name] = self._stand_in((scope.name, name), ASSIGNED, kept)
            if not is_lost(node):
                continue
            unkept = self._unkept.get((scope.name, name)) if node[2] == self._number else None
            if unkept is not None and unkept.is_iterator and self.trying:
                continue  # the trial compares the results
            if unkept is None or name not in now or not unkept.undo(now[name]):
                found[name] = self._stand_in((scope.name, name), node[1], kept)
        return found

    def _unchanged(
        self, reader: ValueReader, scope: Scope, changed: Collection[str], now: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the variables of a scope that the snapshot has unchanged, with their first values."""
        found = {name: value for name, value in self._baseline.code_of(scope.name).items() if name not in changed}
        for name, first in self._baseline.of(scope.name).items():
            if name in changed:
                continue
            kept = now.get(name) if self.trying else None
            if first.node is UNKEPT:
                if first.value.is_iterator and self.trying:
                    continue
                if name not in now or not first.value.undo(now[name]):
                    found[name] = self._stand_in((scope.name, name), first.value.why, kept)
            elif first.node is OPAQUE:
                value = None if first.value is None else first.value()
                if value is not None:  # else the script has dropped it
                    found[name] = value
            else:
                found[name] = self._as_first(reader, first, (scope.name, name), kept)
        return found

    def _as_first(self, reader: ValueReader, first: First, name: Name, kept: Any) -> Any:
        """Return the first value, without later changes to its content; a stand-in if other ranks have changed it."""
        value = first.value() if type(first.value) is weakref.ReferenceType else first.value
        if not isinstance(first.node, list) or first.node[0] == "scope":
            return value
        try:
            differs = encoded(self._writer().write(value)) != first.encoded
        except OpaqueError as error:
            if str(error) == SHARED:
                return self._stand_in(name, SHARED, kept)
            differs = True
        return reader.read(first.node) if differs else value
