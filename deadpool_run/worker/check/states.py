"""Digests of all state on which a rank's next step may depend, for `deadpool-run check`.

That is the protected state, unprotected optimizers, and tensors in plain attributes of protected modules. A repair does not
restore the last two, and the report names them.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deadpool_run.errors import ScriptError
from deadpool_run.worker.codec import TreeWriter, raw_bytes, tensors_in
from deadpool_run.worker.compat.modules import PLAIN_TENSORS, local
from deadpool_run.worker.state.gradients import Kept
from deadpool_run.worker.state.optimizers import OptimizerState
from deadpool_run.worker.state.protected import Protected
from deadpool_run.worker.state.rng import take_rng

Digests = dict[str, dict[str, str]]
"""By kind, then by name. Kinds: weights, optimizer, gradients, buffers, values, generators, attributes."""

MAX_OPTIMIZERS = 64
_DIGEST_BYTES = 8
_MODULE_OWN = frozenset(vars(nn.Module()))


class States:
    """The state of one rank. An unprotected optimizer is included after its first step."""

    def __init__(self, protected: Protected, kept: Callable[[], Iterable[Kept]] | None = None) -> None:
        """`kept` returns the gradients that the last snapshot keeps. Without it there are no digests of gradients."""
        self._protected = protected
        self._kept = kept
        self._unprotected: list[OptimizerState] = []
        self._hook = register_optimizer_step_pre_hook(self._note_optimizer)

    def close(self) -> None:
        """Stop watching for optimizers."""
        self._hook.remove()

    def modules(self) -> int:
        """Return the number of protected modules, children included."""
        return sum(len(list(module.all_modules())) for module in self._protected.modules.values())

    def nbytes(self) -> int:
        """Return about the size of the hashed state."""
        tensors = [*self._protected.parameters().values(), *self._protected.buffer_values()]
        tensors += [tensor for optimizer in self._optimizers() for tensor in tensors_in(optimizer.state)]
        return sum(local(tensor).nbytes for tensor in tensors)

    def digests(self) -> Digests:
        """Return the digests of the present state."""
        with torch.no_grad():
            parameters = self._protected.parameters()
            names = {id(parameter): name for name, parameter in parameters.items()}
            found: Digests = {
                "weights": {name: digest(parameter) for name, parameter in parameters.items()},
                "buffers": {tracked.name: digest(tracked.tensor) for tracked, _, _ in self._protected.buffers()},
                **({} if self._kept is None else {"gradients": _of_gradients(self._kept(), names)}),
                "optimizer": {},
                "values": {},
                "generators": {name: _of_tree(part, name) for name, part in take_rng().items()},
                "attributes": dict(self._attributes()),
            }
            for optimizer in self._optimizers():
                self._add_optimizer(found, optimizer, names)
            for name, obj in self._protected.objects.items():
                found["values"] |= dict(_of_object(name, obj.state_dict()))
            for name, module in self._protected.modules.items():
                found["values"] |= dict(_of_object(name, module.extra()))
        return found

    def _note_optimizer(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        known = [*self._protected.optimizers.values(), *self._unprotected]
        if len(known) < MAX_OPTIMIZERS and not any(optimizer in (each.optimizer, each.keeper) for each in known):
            number, kind = len(self._unprotected) + 1, type(optimizer).__name__
            self._unprotected.append(OptimizerState(f"{kind} {number} (not protected)", optimizer))

    def _optimizers(self) -> list[OptimizerState]:
        return [*self._protected.optimizers.values(), *self._unprotected]

    def _add_optimizer(self, found: Digests, optimizer: OptimizerState, names: dict[int, str]) -> None:
        own = dict(names)
        for name, parameter in optimizer.parameters():
            if id(parameter) not in names:
                own[id(parameter)] = name.removeprefix(f"{optimizer.name}/")
                found["weights"][name] = digest(parameter)
        for _, _, tracked in optimizer.tensors(own):
            found["optimizer"][tracked.name] = digest(tracked.tensor)
        plain = optimizer.plain(own)
        if any(plain["state"].values()) or plain["shared"] or plain["forms"]:
            found["optimizer"] |= dict(_of_object(optimizer.name, plain))
        for number, group in enumerate(optimizer.take()):
            for key, value in group.items():
                found["optimizer"][f"{optimizer.name}/groups.{number}.{key}"] = _of_tree(value, key)

    def _attributes(self) -> Iterator[tuple[str, str]]:
        for name, module in self._protected.modules.items():
            for path, child in module.all_modules():
                for key, value in list(vars(child).items()):
                    if key in _MODULE_OWN:
                        continue
                    where = f"{name}/{path}.{key}" if path else f"{name}/{key}"
                    for place, tensor in _held(value, where):
                        if _is_plain(tensor):
                            yield place, digest(tensor)


def digest(tensor: Tensor) -> str:
    """Return a digest of this rank's part of a tensor: dtype, shape and bytes."""
    own = local(tensor).detach()
    sha = hashlib.blake2b(f"{own.dtype}{tuple(own.shape)}".encode(), digest_size=_DIGEST_BYTES)
    sha.update(raw_bytes(own))
    return sha.hexdigest()


def _of_gradients(kept: Iterable[Kept], names: dict[int, str]) -> dict[str, str]:
    return {names.get(id(each.parameter), "a parameter"): digest(each.gradient) for each in kept}


def _of_tree(tree: Any, name: str) -> str:
    """Return a digest of plain values; of an unsupported value only its type counts."""
    writer = TreeWriter()
    try:
        text = json.dumps(writer.encode(tree, name))
    except ScriptError:
        text = f"{type(tree).__module__}.{type(tree).__qualname__}"
    sha = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES)
    for blob in writer.blobs:
        sha.update(blob)
    for tensor in writer.tensors:
        sha.update(digest(tensor).encode())
    return sha.hexdigest()


def _of_object(name: str, state: Any) -> Iterator[tuple[str, str]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield f"{name}.{key}", _of_tree(value, f"{name}.{key}")
    else:
        yield name, _of_tree(state, name)


def _held(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for place, each in [(where, value), *((f"{where}.{key}", each) for key, each in items)]:
        if isinstance(each, Tensor):
            yield place, each
        elif isinstance(each, nn.Module) and each is not value:
            yield from ((f"{place}.{name}", tensor) for name, tensor in each.named_parameters())
            yield from ((f"{place}.{name}", tensor) for name, tensor in each.named_buffers())


def _is_plain(tensor: Tensor) -> bool:
    own = local(tensor)
    return type(own) in PLAIN_TENSORS and own.layout is torch.strided and not own.is_meta
