"""The protected objects by name, and their tensors."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from deadpool_run.errors import ScriptError
from deadpool_run.vault.segments import SlotRole
from deadpool_run.worker.codec import copied, objects_in
from deadpool_run.worker.compat import fsdp, scalers
from deadpool_run.worker.compat import modules as compat_nn
from deadpool_run.worker.state import gradients
from deadpool_run.worker.state.gradients import Kept
from deadpool_run.worker.state.left_gradients import LeftGradients, is_stand_in, is_watched
from deadpool_run.worker.state.modules import ModuleState
from deadpool_run.worker.state.optimizers import OptimizerState, Tracked, wrapped
from deadpool_run.worker.state.rng import GeneratorState
from deadpool_run.worker.state.state_tensors import StateTensors


class Protected:
    """The protected objects by name."""

    def __init__(self, wrappers: Iterable[DistributedDataParallel] = ()) -> None:
        self._wrappers = wrappers
        self.modules: dict[str, ModuleState] = {}
        self.optimizers: dict[str, OptimizerState] = {}
        self.objects: dict[str, Any] = {}
        self.wrappers: list[Optimizer] = []
        """Optimizers around others, whose attributes are kept as variables are."""
        self.late: list[str] = []
        """Why a loss stops the job, for each scheduler and scaler that the loop has made and that no snapshot holds."""
        self.state_tensors = StateTensors(self.heavy)
        self._loose: set[int] = set()
        self._kept: set[int] = set()
        """The identities of the parameters whose gradients the last `take` has kept."""
        self.views, self.used, self.left = gradients.BucketViews(), gradients.UsedGradients(), LeftGradients()

    def add(self, name: str, obj: Any) -> None:
        """Protect an object that has a state, under a new name."""
        if isinstance(obj, nn.Module):
            self.modules[name] = ModuleState(name, obj, self._wrappers)
        elif isinstance(obj, Optimizer):
            (optimizer,) = wrapped(obj)
            self.optimizers[name] = OptimizerState(name, optimizer)
            optimizer.register_step_pre_hook(lambda optimizer, *_: self.views.note(optimizer, self.ddps()))
            self.state_tensors.watch(optimizer)
            if optimizer is not obj:
                self.wrappers.append(obj)
        else:
            self.objects[name] = GeneratorState(obj) if isinstance(obj, torch.Generator) else obj

    def begin(self) -> None:
        """Note the settings of the modules, as the loop begins."""
        for module in self.modules.values():
            module.begin()

    def ddps(self) -> list[DistributedDataParallel]:
        """Return the DDPs in and around the modules."""
        return [ddp for module in self.modules.values() for ddp in module.replicated]

    def parameters(self) -> dict[str, Tensor]:
        """Return every parameter once, by name, however many modules and optimizers hold it."""
        found: dict[str, Tensor] = {}
        known: set[int] = set()
        of_optimizers = (optimizer.parameters() for optimizer in self.optimizers.values())
        for name, parameter in chain(self._of_modules(), *of_optimizers):
            if id(parameter) in known:
                continue
            known.add(id(parameter))
            if name in found:
                raise ScriptError(
                    f"two protected parameters have the name {name!r}.\nProtect their modules under different names."
                )
            found[name] = parameter
        return found

    def _of_modules(self) -> Iterator[tuple[str, Tensor]]:
        return chain.from_iterable(module.parameters for module in self.modules.values())

    def trained(self) -> set[int]:
        """Return the identities of the parameters that optimizers hold."""
        return {id(each) for optimizer in self.optimizers.values() for _, each in optimizer.parameters()}

    def fingerprint(self, *, plain: bool) -> list[int]:
        """Return numbers that stay equal while the tensors of `heavy()` are the same, in the same memory."""
        found: list[int] = []
        for module in self.modules.values():
            found += module.fingerprint()
        for optimizer in self.optimizers.values():
            found += optimizer.fingerprint(plain=plain)
        return found

    def has_plain(self) -> bool:
        """Return whether an optimizer keeps state that is not a plain tensor."""
        return any(optimizer.has_plain() for optimizer in self.optimizers.values())

    def heavy(self) -> Iterator[Tracked]:
        """Yield the parameters and the optimizer state."""
        parameters = self.parameters()
        names = {id(parameter): name for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            yield Tracked(name, SlotRole.PARAMETER, parameter)
        for optimizer in self.optimizers.values():
            yield from (tracked for _, _, tracked in optimizer.tensors(names))

    def buffer_values(self) -> list[Tensor]:
        """Return the present buffers, in the order of `buffers()`."""
        return [buffer for module in self.modules.values() for buffer in module.buffer_values()]

    def buffers(self) -> Iterator[tuple[Tracked, nn.Module, str]]:
        """Yield each buffer that is not None, with its owner and key."""
        for module in self.modules.values():
            yield from module.buffers()

    def places(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield name, owner and key of each buffer, also of those that are None."""
        for module in self.modules.values():
            yield from module.places()

    def follow(self) -> bool:
        """Take references again to parameters that a step has exchanged; return whether there were any."""
        exchanged = [module.follow() for module in self.modules.values()]
        if any(exchanged):
            self.state_tensors.forget()
        return any(exchanged)

    def put_back(self, members: Mapping[str, list[list[Tensor]]]) -> None:
        """Put exchanged parameters back in modules, and in the groups of optimizers, whose members these were."""
        for module in self.modules.values():
            module.put_back()
        for name, parameters in members.items():
            self.optimizers[name].put_members(parameters)

    def refresh(self, *, final: bool) -> None:
        """Take references again. With `final`, raises `ScriptError` for anything that a replacement would not create."""
        for module in self.modules.values():
            module.refresh(final=final)
        loose = self.trained() - {id(parameter) for _, parameter in self._of_modules()}
        if final and not loose <= self._loose:
            raise ScriptError(
                "protect(): an optimizer was given a parameter during training that belongs to no protected module, and that a "
                "replacement would not create.\nCreate it in set-up, as part of a protected module."
            )
        self._loose = loose

    def take(self, stepped: Collection[int] = ()) -> dict[str, Any]:
        """Return copies of all small values except buffers, generator states and plain optimizer state.

        `stepped` are the identities of the optimizers that have updated since the last call: gradients that they used up
        are not state.
        """
        kept = self.gradients(stepped)
        self._kept = {id(each.parameter) for each in kept}
        return {
            "modules": {name: module.take() for name, module in self.modules.items()},
            "optimizers": {name: optimizer.take() for name, optimizer in self.optimizers.items()},
            "members": {name: optimizer.members() for name, optimizer in self.optimizers.items()},
            "gradients": kept,
            "objects": {name: copied(scalers.state_of(obj)) for name, obj in self.objects.items()},
        }

    def reset(self) -> None:
        """Reset FSDP2 to its state before any forward, so that every rank gathers the same, in the same order.

        A DDP without buckets forgets an interrupted reduction: it would decide its buckets from that, and a replacement would
        not. Gradients may be lost. An interrupted step leaves unreduced ones, which would be added to the next step's. An
        evaluation leaves gathered parameters, and forwards without a backward.
        """
        for module in self.modules.values():
            module.reshard()
            fsdp.reset(module.sharding)
            for ddp in module.replicated:
                if not compat_nn.has_buckets(ddp):
                    compat_nn.forget_reduction(ddp)
            for child in module.sharding:
                fsdp.drop_gradients(child)

    def has_untrained_module(self) -> bool:
        """Return whether no optimizer trains some module: scripts write to one at any time, often through `.data`."""
        trained = self.trained()
        return any(
            module.parameters and not any(id(parameter) in trained for _, parameter in module.parameters)
            for module in self.modules.values()
        )

    def gradients(self, stepped: Collection[int]) -> list[Kept]:
        """Return each gradient that is state; `stepped` as in `take`. Without optimizers, those of the modules may be.

        If the script uses gradients of the step before, all are state.
        """
        self.left.unwatch()
        updated = [each for each in self.optimizers.values() if id(each.optimizer) in stepped]
        self.used.note(parameter for optimizer in updated for _, parameter in optimizer.parameters())
        idle = [optimizer.parameters() for optimizer in self.optimizers.values() if optimizer not in updated]
        candidates = chain(*idle) if self.optimizers or stepped else self._of_modules()
        found = {id(each): each for _, each in candidates if each not in self.used}
        if self.left.are_kept:
            found |= {id(each): each for each in self.parameters().values() if not is_stand_in(each)}
        self.left.note_update(found.values())
        kept = self.views.take(found.values(), self.ddps()) if found else []
        if not stepped:
            for module in self.modules.values():
                gradients.refuse_gathered(module.sharding)
        return kept

    def gradient_facts(self, parameters: Collection[Tensor], step: int) -> dict[str, Any]:
        """Return what a snapshot says of gradients that it does not hold; `step` is the next one. Long lists are left out."""
        without = [parameter for parameter in parameters if parameter.grad is None]
        has_some = len(without) < len(parameters)
        left = [each for each in parameters if each.grad is not None and id(each) not in self._kept]
        self.left.learn(left, again=is_watched(step))
        lost = list(filter(self.left.is_lost, left))
        return {
            "gradients": has_some,
            "without": without if has_some else [],
            "lost": None if len(lost) == len(left) else lost,
            "left": self.left.are_kept,
        }

    def put_gradients(self, kept: Collection[Kept], facts: Mapping[str, Any]) -> None:
        """Set the kept gradients, and what `gradient_facts` returned."""
        self.views.restore(kept)
        self.left.are_kept |= facts.get("left", False)
        parameters = self.parameters()
        without, lost = facts["without"] if facts["gradients"] else parameters.values(), facts["lost"]
        is_lost = None if lost is None else {*map(id, lost)}
        gradients.put(parameters, kept, {*map(id, without)}, is_lost, self.left)
        self.left.forget_copies()
        ours = {id(each.parameter) for each in kept}
        self.used.note(parameter for parameter in parameters.values() if id(parameter) not in ours)

    def watch_gradients(self, step: int, *, copying: bool) -> None:
        """Notice, in some steps, whether this one uses gradients that the last one has left. `copying`: it is run again."""
        if is_watched(step) and not self.left.are_kept:
            parameters = self.parameters().values()
            left = (each for each in parameters if id(each) not in self._kept and self.left.is_lost(each))
            self.left.watch(left, copying=copying)

    def put(self, values: dict[str, Any]) -> None:
        """Set what `take` returned, except gradients."""
        for name, module in self.modules.items():
            module.put(values["modules"][name])
        for name, optimizer in self.optimizers.items():  # first: loading a scheduler sets rates of groups
            optimizer.put_members(values["members"][name])
        for name, obj in self.objects.items():
            scalers.load_state(obj, copied(values["objects"][name]))
            for scaler in (each for each in objects_in(obj) if isinstance(each, GradScaler)):
                scalers.forget_unscaled(scaler)  # the interrupted step did not reach `update()`, which drops its notes
        for name, optimizer in self.optimizers.items():  # last: loading a scheduler may set a rate
            optimizer.put(values["optimizers"][name])
