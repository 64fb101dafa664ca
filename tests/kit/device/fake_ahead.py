"""Lets the host run ahead of the fake device: tensor operations go to its current stream, and the host continues at once.

An operation that returns new tensors runs twice. It runs at once, on the present contents of its inputs, so that the host
knows the shape. It runs again in its turn on the stream, and its result replaces the first one. Views change only the host's
data of a tensor, and run at once. Reads of the host (`item`, `tolist`, `numpy`) wait for the stream, as on a GPU.
"""

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_AT_ONCE = {"resize_", "set_", "_resize_output_", "record_stream", "lift_fresh", "lift_fresh_copy", "detach_"}


class Ahead(TorchDispatchMode):
    """The mode of the main thread, which also runs the backward of CPU tensors."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, stream = kwargs or {}, self._device.current
        schema = func._schema
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = schema.name.partition("::")[2]
        if not tensors or name in _AT_ONCE or _is_view(schema):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or not all(map(_is_tensors, schema.returns)):
            stream.record().wait()
            return func(*args, **kwargs)
        # An alias has its own version counter: the host has counted this write already.
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.data, (args, kwargs))
        if schema.is_mutable:
            stream.enqueue(lambda: func(*args, **kwargs))
            return _written(schema, args, kwargs, tensors)
        result = func(*args, **kwargs)
        outputs = [leaf.data for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

        def again():
            found = [leaf for leaf in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for output, value in zip(outputs, found, strict=True):
                output.copy_(value)

        stream.enqueue(again)
        return result


def read_in_order(device):
    """Make the host wait for the current stream when it reads a tensor's memory without an operation."""
    for name in ("numpy", "tolist", "__array__"):
        plain = getattr(torch.Tensor, name)

        def waiting(self, *args, _plain=plain, **kwargs):
            device.current.record().wait()
            return _plain(self, *args, **kwargs)

        setattr(torch.Tensor, name, waiting)


def _is_view(schema):
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)


def _is_tensors(returned):
    return "Tensor" in str(returned.type)


def _written(schema, args, kwargs, tensors):
    """Return the arguments that the operation writes, in order. It returns the same ones."""
    if not schema.returns:
        return None
    by_name = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    originals = {tensor.data_ptr(): tensor for tensor in tensors}
    written = [
        pytree.tree_map_only(torch.Tensor, lambda alias: originals.get(alias.data_ptr(), alias), by_name[argument.name])
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in by_name
    ]
    return written[0] if len(schema.returns) == 1 else tuple(written)
