"""Checks that everything a script trains is protected. Anything else would silently differ on a replacement.

Optimizers are found when they step. Modules, and tensors that a script trains by hand, are found among all live objects when
the loop begins. Those that change later are state: torch counts writes, except through `.data`, and samples show which writes have
changed something. Schedulers and scalers are also found when the loop makes them: no replacement does, so a loss then stops the job.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from deadpool_run.worker.codec import objects_in, tensors_in
from deadpool_run.worker.compat import made
from deadpool_run.worker.compat.modules import PLAIN_TENSORS, buffers_of, local, parameters_of, writes_of
from deadpool_run.worker.state.digest import sample
from deadpool_run.worker.state.optimizers import wrapped
from deadpool_run.worker.state.protected import Protected
from deadpool_run.worker.transcript.rehearsal import REHEARSAL_STEPS
from deadpool_run.worker.verify.script_names import path_to, warn

_BEFORE_LOOP = "before job.steps()"
_AFTER_LOSS = "after a loss, no process has it as it was"
_FROM_NOW_ON = "a loss stops the job from now on"
_UNKNOWN = -1


def is_sampled(step: int) -> bool:
    """Return whether unprotected tensors and replicas are checked after this step: at powers of two."""
    return step & (step - 1) == 0


@dataclass(slots=True)
class _Watched:
    """An unprotected tensor, with a digest of its first sample."""

    owner: "weakref.ref[Any]"
    name: str
    tensor: "weakref.ref[Tensor]"
    before: int
    trains: bool
    """Its owner has parameters. A metric has none."""
    writes: int = _UNKNOWN
    """How often it had been written at the last look, as torch counts."""

    def note(self, tensor: Tensor) -> None:
        """Note the tensor that has been looked at, which may have taken the place of another."""
        self.tensor, self.writes = weakref.ref(tensor), _writes(tensor)

    def present(self) -> Tensor | None:
        """Return the tensor, or another one that a step has put in its place."""
        tensor, owner = self.tensor(), self.owner()
        if isinstance(owner, nn.Module) and not isinstance(tensor, DTensor):  # FSDP2 exchanges its own
            now = parameters_of(owner).get(self.name, buffers_of(owner).get(self.name))
            return now if type(now) in PLAIN_TENSORS else tensor
        return tensor


class Coverage:
    """Compares the protected objects with the trained ones. For the main thread."""

    def __init__(self, protected: Protected, is_kept: Callable[[object], bool] = lambda _: False) -> None:
        """`is_kept` returns whether the content of an object is among the script's variables, which snapshots have."""
        self._protected = protected
        self._is_kept = is_kept
        self._watched: list[_Watched] = []
        self._counted: list[weakref.ref[Tensor]] = []
        """The watched tensors, of which torch counts the writes."""
        self._counts: list[int] = []
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._rehearses = False
        self._helpers: list[tuple[weakref.ref[Any], str]] = []
        """Unprotected schedulers and scalers that a replacement makes too, each with its state at first."""
        self._late: list[tuple[weakref.ref[Any], str]] = []
        """Unprotected ones that the loop has made after the first steps, each with what a refusal says of it."""
        made.watch()
        self._made_in_setup: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._settled: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._pending: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers that are not known to be protected, each with the first step in which it updated."""

    def begin(self, *, rehearses: bool = False) -> None:
        """Find the unprotected objects when the loop begins. Takes some tens of milliseconds.

        A replacement `rehearses` first. What it has then, the first process of the rank had after the same steps.
        """
        self._rehearses = rehearses
        if not rehearses:
            _warn_of_measured_algorithms()
        made.take_made()
        modules, optimizers, loose, helpers = _live_objects()
        self._helpers += self._unprotected_helpers(helpers)
        self._made_in_setup.update(optimizers)
        roots = [root for module in self._protected.modules.values() for root in module.roots()]
        inside = {id(child) for root in roots for child in root.modules()}
        known = {id(local(each)) for each in self._protected.parameters().values()}
        parts = {id(child) for module in modules for child in module.children()}
        for module in sorted(
            modules, key=lambda module: id(module) in parts
        ):  # the message names the whole model, not a part
            if id(module) in inside:
                continue
            self._watched += _watch(module, known)
            if isinstance(module, (DistributedDataParallel, FSDPModule)):
                self._wrappers.add(module)
        for tensor in loose:
            if id(tensor) not in known:
                self._watched += _watched_tensor(tensor, "", tensor, trains=True)
        self._count()

    def note(self, optimizer: Optimizer, step: int) -> None:
        """Note an optimizer that updates in this step."""
        if optimizer in self._settled or optimizer in self._pending:
            return
        if self._is_protected(optimizer):
            self._settled.add(optimizer)
        else:
            self._pending[optimizer] = step

    def problem(self, step: int, *, look: bool) -> str:
        """Return an error message about an unprotected object that the step trained; empty if there is none.

        Unprotected tensors are compared with their first samples if torch has counted a write; with `look`, all are.
        """
        for optimizer, first in list(self._pending.items()):
            if self._is_held_by_objects(optimizer):
                del self._pending[optimizer]
                self._settled.add(optimizer)
            elif optimizer in self._made_in_setup or step != first:
                return _unprotected(
                    "optimizer",
                    optimizer,
                    f"updated weights in step {step}, but is not protected",
                    "empty state",
                    in_loop=optimizer not in self._made_in_setup,
                )
        for noted, before in self._helpers:
            helper = noted()
            if helper is not None and repr(helper.state_dict()) != before:
                return _unprotected(_kind_of(helper), helper, f"is not protected, and its state changed in step {step}")
        self._find_made_helpers(step)
        if not look:
            return self._changed(f"in step {step}", written=True) if self._is_written() else ""
        trained = self._protected.trained()
        for wrapper in self._wrappers:
            if any(id(parameter) in trained for parameter in wrapper.parameters()):
                return _unprotected(
                    "module", wrapper, f"is not protected, and its parameters are trained in step {step}"
                )
        return self._changed(f"in step {step}")

    def changed(self) -> str:
        """Return an error message about an unprotected tensor that has changed since the loop began; empty if there is none.

        Call it before each restore. The first one of a replacement ends its rehearsal: no peer has kernels on the device yet.
        """
        if self._rehearses:
            self._begin_after_rehearsal()
            return ""
        return self._changed("in training")

    def _begin_after_rehearsal(self) -> None:
        self._rehearses = False
        helpers = [helper for reference, _ in self._helpers if (helper := reference()) is not None]
        self._helpers = list(self._unprotected_helpers([*helpers, *made.take_made()]))
        for watched in self._watched:
            if (tensor := watched.present()) is not None:
                watched.before = sample(tensor)
                watched.note(tensor)
        self._count()

    def _unprotected_helpers(self, helpers: Iterable[Any]) -> Iterator[tuple["weakref.ref[Any]", str]]:
        """Yield those that no protected object refers to, with their states. A disabled scaler has none."""
        for helper in helpers:
            if not any(_refers_to(obj, helper) for obj in self._protected.objects.values()):
                state = helper.state_dict()
                if state:
                    yield weakref.ref(helper), repr(state)

    def _find_made_helpers(self, step: int) -> None:
        """Find what this step has made. Warn of it, if a replacement does not make it."""
        for reference, state in self._unprotected_helpers(made.take_made()):
            if step < REHEARSAL_STEPS:
                self._helpers.append((reference, state))
            elif (helper := reference()) is not None:
                self._late.append((reference, _made_late(helper, step)))
        inside = [other() for other, _ in self._late]
        self._late = [
            (reference, why)
            for reference, why in self._late
            if (helper := reference()) is not None
            and not any(_refers_to(other, helper) for other in inside if other is not helper)
        ]
        for _, why in self._late:
            if why not in self._protected.late:
                warn(why.replace(_AFTER_LOSS, _FROM_NOW_ON))
        self._protected.late = [why for _, why in self._late]

    def _count(self) -> None:
        tensors = [(watched, watched.tensor()) for watched in self._watched if watched.writes != _UNKNOWN]
        self._counted = [weakref.ref(local(tensor)) for _, tensor in tensors if tensor is not None]
        self._counts = [watched.writes for watched, tensor in tensors if tensor is not None]

    def _is_written(self) -> bool:
        """Return whether a watched tensor was written or has gone. Runs at the end of each step."""
        tensors: list[Any] = [reference() for reference in self._counted]
        try:
            return list(map(writes_of, tensors)) != self._counts
        except AttributeError:  # of None: one has gone
            return True

    def _changed(self, when: str, *, written: bool = False) -> str:
        """Compare the tensors with their first samples; with `written`, those that torch has counted writes of."""
        kept = []
        for watched in self._watched:
            owner, tensor = watched.owner(), watched.present()
            if owner is None or tensor is None:
                continue
            if (written and _writes(tensor) == watched.writes) or sample(tensor) == watched.before:
                watched.note(tensor)
                kept.append(watched)
            elif not watched.trains:
                if not self._is_kept(owner):
                    _warn_of_metric(owner, watched.name)
            elif isinstance(owner, nn.Module):
                return _unprotected("module", owner, f"is not protected, and its {watched.name!r} changed {when}")
            else:
                return _unprotected_tensor(tensor, when)
        self._watched = kept
        self._count()
        return ""

    # --- what is protected -----------------------------------------------------------------------------------------

    def _is_protected(self, optimizer: Optimizer) -> bool:
        """Return whether a snapshot has this optimizer's state: directly, through one that shares it, or, of a wrapper, that of the inner ones."""
        return all(
            any(
                each in (state.optimizer, state.keeper) or each.state is state.optimizer.state
                for state in self._protected.optimizers.values()
            )
            for each in wrapped(optimizer) or [optimizer]
        )

    def _is_held_by_objects(self, optimizer: Optimizer) -> bool:
        own = {id(each) for each in tensors_in(optimizer.state)}
        return any(
            _refers_to(obj, optimizer) and own <= {id(each) for each in tensors_in(obj.state_dict())}
            for obj in self._protected.objects.values()
        )


# --- live objects --------------------------------------------------------------------------------------------------


def _is_trained(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf and tensor.requires_grad
    except RuntimeError:  # a view of memory that was written to since, as in FSDP1: not a leaf
        return False


def _live_objects() -> tuple[list[nn.Module], list[Optimizer], list[Tensor], list[Any]]:
    """Return modules, optimizers, trained tensors outside of modules, and schedulers and scalers."""
    objects = gc.get_objects()
    places = {kind: _place_of(kind) for kind in set(map(type, objects))}
    found: tuple[list[Any], list[Any], list[Any], list[Any]] = ([], [], [], [])
    for obj in objects:
        place = places[type(obj)]
        if place is not None:
            found[place].append(obj)
    modules, optimizers, tensors, helpers = found
    return modules, optimizers, [each for each in tensors if _is_trained(each)], helpers


def _place_of(kind: type) -> int | None:
    if issubclass(kind, nn.Module):
        return 0
    if issubclass(kind, Optimizer):
        return 1
    if issubclass(kind, made.KINDS):
        return 3
    return 2 if kind is Tensor else None


def _watch(module: nn.Module, known: set[int]) -> Iterator[_Watched]:
    trains = any(True for _ in module.parameters())
    for name, tensor in chain(parameters_of(module).items(), buffers_of(module).items()):
        if tensor is not None and id(local(tensor)) not in known:
            yield from _watched_tensor(module, name, tensor, trains=trains)


def _watched_tensor(owner: Any, name: str, tensor: Tensor, *, trains: bool) -> list[_Watched]:
    own = local(tensor)
    if type(own) not in PLAIN_TENSORS or own.is_meta or own.layout is not torch.strided or own.is_quantized:
        return []
    found = _Watched(weakref.ref(owner), name, weakref.ref(tensor), sample(tensor), trains)
    found.note(tensor)
    return [found]


def _writes(tensor: Tensor) -> int:
    own = local(tensor)
    return _UNKNOWN if own.is_inference() else writes_of(own)


def _refers_to(obj: Any, wanted: object) -> bool:
    return any(each is wanted for each in objects_in(obj))


# --- messages -------------------------------------------------------------------------------------------------------


def _unprotected(
    what: str, obj: object, problem: str, begins: str = "the state of set-up", *, in_loop: bool = False
) -> str:
    where = path_to(obj)
    return (
        f"{_called(what, obj, where)} {problem}: a replacement for a lost rank would start with {begins}.\n"
        f"{_protect(what, where, in_loop=in_loop)}"
    )


def _protect(what: str, where: str, *, in_loop: bool) -> str:
    variable = where or ("model" if what == "module" else what)
    call = f"all job.protect({variable.rpartition('.')[2]}={variable})"
    return f"Create it {_BEFORE_LOOP}, and c{call} there." if in_loop else f"C{call} {_BEFORE_LOOP}."


def _made_late(helper: object, step: int) -> str:
    what, where = _kind_of(helper), path_to(helper)
    return (
        f"{_called(what, helper, where)} was made in step {step}, and no snapshot holds it: {_AFTER_LOSS}.\n"
        f"{_protect(what, where, in_loop=True)}"
    )


def _kind_of(helper: object) -> str:
    return "scaler" if isinstance(helper, GradScaler) else "scheduler"


def _unprotected_tensor(tensor: Tensor, when: str) -> str:
    where = path_to(tensor)
    return (
        f"{_called('tensor', tensor, where)} of shape {tuple(tensor.shape)} requires gradients and changed {when}, "
        f"but is not protected.\nMake it an nn.Parameter of a module, and call job.protect() with that module {_BEFORE_LOOP}."
    )


def _called(what: str, obj: object, where: str) -> str:
    kind = "" if type(obj) is Tensor else f" ({type(obj).__name__})"
    article = "an" if what[0] in "aeiou" else "a"
    return f"the {what} {where!r}{kind}" if where else f"{article} {what}{kind}"


def _warn_of_measured_algorithms() -> None:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first and torch.cuda.is_initialized() and torch.backends.cudnn.benchmark:
        warn(
            "torch.backends.cudnn.benchmark is on: cuDNN measures its algorithms in each process, so a replacement may choose others, "
            "which round differently.\nTurn it off if weights have to be equal bit for bit after a loss."
        )


def _warn_of_metric(module: Any, name: str) -> None:
    warn(
        f"{type(module).__name__}.{name} changes in training and is not protected: after a loss it differs on the "
        "replaced rank.\nProtect the module that has it, if it matters."
    )
