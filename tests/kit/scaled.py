"""Parameters of a class around a tensor, with a number beside it, as torchao's float8 weights under FSDP2 have their scale."""

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

_KEEP = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
}
"""Operators of FSDP2 whose results are of the class, too."""


class Scaled(torch.Tensor):
    """A weight that is gathered multiplied by a scale, which the script computes after each update; without one, by 1."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner):
        self.inner, self.scale = inner, None

    def __tensor_flatten__(self):
        return ["inner"] if self.scale is None else ["inner", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, _context, _size, _stride):
        made = cls(parts["inner"])
        made.scale = parts.get("scale")
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, found) if func in _KEEP else found

    def fsdp_pre_all_gather(self, _mesh):
        return (self.inner if self.scale is None else self.inner * self.scale,), ()

    def fsdp_post_all_gather(self, gathered, _metadata, _dtype, *, out=None):
        return None if out is not None else (gathered[0], gathered)


def wrap(model):
    """Make the matrices of a model such parameters."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 2:
                module.register_parameter(name, torch.nn.Parameter(Scaled(parameter.detach())))
    return model


@torch.no_grad()
def set_scales(model):
    """Set the scale of each such weight of a sharded model, from its largest value on all ranks. For the end of a step."""
    wrapped = [p._local_tensor for p in model.parameters() if isinstance(p._local_tensor, Scaled)]
    largest = torch.stack([each.inner.abs().max() for each in wrapped])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    for each, scale in zip(wrapped, 1 + 0.1 * largest, strict=True):
        each.scale = scale
