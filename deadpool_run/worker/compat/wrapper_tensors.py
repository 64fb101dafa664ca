"""Tensors that consist of others, which torch calls wrapper subclasses: torchao's optimizer state of 8 bits, say.

A snapshot has their parts, like any other tensors. Their form is the rest: class, shape and context.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from deadpool_run.worker.compat.modules import PLAIN_TENSORS, is_wrapper, shard_of


def is_composed(value: object) -> bool:
    """Return whether a tensor, of a DTensor its shard, consists of others. Cheap for any other value."""
    return type(value) not in PLAIN_TENSORS and isinstance(value, Tensor) and bool(is_wrapper(shard_of(value)))


def parts_of(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a tensor consists of, and where it has them: names of attributes, joined by dots."""
    own: Any = shard_of(tensor)
    for name in own.__tensor_flatten__()[0]:
        part = getattr(own, name)
        if is_composed(part):
            yield from ((f"{name}.{inner}", each) for inner, each in parts_of(part))
        else:
            yield name, part


def form_of(tensor: Tensor) -> dict[str, Any]:
    """Return what makes a tensor apart from values: of one that consists of others, its class, context and parts."""
    own: Any = shard_of(tensor)
    form: dict[str, Any] = {"shape": list(own.shape), "stride": list(own.stride())}
    if isinstance(tensor, DTensor):
        whole = {"shape": list(tensor.shape), "stride": list(tensor.stride())}
        form["shard_of"] = whole | {"placements": list(map(str, tensor.placements))}
    if not is_composed(own):
        return form | {"dtype": str(own.dtype).removeprefix("torch."), "device": own.device.type}
    names, context = own.__tensor_flatten__()
    return form | {
        "class": [type(own).__module__, type(own).__qualname__],
        "context": context,
        "parts": {name: form_of(getattr(own, name)) for name in names},
    }
