"""Checks of objects that a script protects: unsupported state is an error there, not at a recovery."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from deadpool_run.errors import ScriptError
from deadpool_run.vault.segments import SlotRole
from deadpool_run.worker.codec import TreeWriter, has_state
from deadpool_run.worker.compat.modules import hook_states
from deadpool_run.worker.process.script_files import own_modules
from deadpool_run.worker.snapshot.plan import describe
from deadpool_run.worker.state import hooks
from deadpool_run.worker.state.modules import ModuleState
from deadpool_run.worker.state.optimizers import OptimizerState, Tracked, wrapped
from deadpool_run.worker.variables.modules import LEAVES
from deadpool_run.worker.verify.script_names import warn


def check_new(name: str, obj: object, names: Collection[str]) -> None:
    """Raise `ScriptError` if an object cannot be protected under this name next to those of `names`."""
    if name in names:
        raise ScriptError(f"protect(): an object named {name!r} is protected already.\nGive each object its own name.")
    if not has_state(obj) and not isinstance(obj, torch.Generator):
        raise ScriptError(
            f"protect(): {name}={type(obj).__name__} has no state_dict() and load_state_dict().\n"
            "Add both methods, or keep its state in an object that has them."
        )
    if _is_of_fsdp1(obj):
        raise ScriptError(
            f"protect(): {name} has a FullyShardedDataParallel (FSDP1), which frees the memory of parameters between their uses.\n"
            "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2)."
        )
    if isinstance(obj, Optimizer) and (count := len(wrapped(obj))) != 1:
        raise ScriptError(
            f"protect(): {name}={type(obj).__name__} is a wrapper around {count} optimizers, not one.\n"
            "Protect each optimizer inside it. Snapshots keep the wrapper's own attributes as variables."
            if count
            else f"protect(): {name}={type(obj).__name__} has not called Optimizer.__init__(), and has no optimizer inside.\n"
            "Call super().__init__(params, defaults) in its __init__."
        )


def _is_of_fsdp1(obj: object) -> bool:
    return isinstance(obj, nn.Module) and any(isinstance(each, FullyShardedDataParallel) for each in obj.modules())


def check_module(state: ModuleState) -> None:
    """Raise `ScriptError` if a snapshot cannot hold the module; warn of unknown communication hooks."""
    _check_tensors(state.parameters, SlotRole.PARAMETER)
    _check_tensors((tracked.name, tracked.tensor) for tracked, _, _ in state.buffers())
    check_tree(state.extra(), state.name)
    for ddp in state.replicated:
        for hook in filter(hooks.is_unknown, hook_states(ddp)):
            if type(hook).__module__ in {name for name, _, _ in own_modules()}:
                continue  # variables of the script's objects are kept
            warn(
                f"protect(): DDP's communication hook in {state.name!r} keeps a {type(hook).__qualname__}, whose state is not "
                "protected.\nAdd state_dict() and load_state_dict() to that class."
            )


def check_optimizer(state: OptimizerState) -> None:
    """Raise `ScriptError` if a snapshot cannot hold the optimizer."""
    _check_tensors(state.parameters(), SlotRole.PARAMETER)
    names = {id(parameter): name for name, parameter in state.parameters()}
    _check_tensors((tracked.name, tracked.tensor) for _, _, tracked in state.tensors(names))
    check_tree([state.take(), state.plain(names)], state.name)
    if state.keeper is state.optimizer:
        values, attributes = state.optimizer.state_dict(), vars(state.optimizer)
        more = sorted(
            name
            for name in values.keys() - {"state", "param_groups"}
            if name not in attributes or type(values[name]) not in LEAVES or attributes[name] != values[name]
        )  # attributes are kept as variables are
        if more:
            kind = type(state.optimizer).__qualname__
            raise ScriptError(
                f"protect(): the state_dict() of {state.name!r}, a {kind}, holds {', '.join(map(repr, more))} next to the state of "
                "its parameters, and only the latter is protected.\nMove it to the optimizer's param_groups, or to an attribute of the "
                "same name if it is a number or a string, or protect an object of your own that has it."
            )


def check_tree(tree: Any, name: str) -> None:
    """Raise `ScriptError` if a snapshot cannot hold these values, which are a part of the state of an object."""
    writer = TreeWriter()
    writer.encode(tree, f"protect(): the state of {name!r}")
    _check_tensors((f"the state of {name!r}", tensor) for tensor in writer.tensors)


def _check_tensors(named: Iterable[tuple[str, Tensor]], role: SlotRole = SlotRole.VALUE) -> None:
    for name, tensor in named:
        if is_lazy(tensor):
            raise ScriptError(
                f"protect(): {name} is not initialized: its shape is known only after a first forward.\n"
                "Run a forward before protect(), or use a layer with explicit sizes."
            )
        if tensor.is_meta:
            raise ScriptError(
                f"protect(): {name} is on the meta device, where it has no values.\n"
                "Allocate it (to_empty(), or load a checkpoint) before protect()."
            )
        describe(Tracked(f"protect(): {name}", role, tensor), 0)
