"""An optimizer whose state is tensors that consist of others, as that of torchao's optimizers with 8 bits."""

import torch
from torch.distributed.tensor import DTensor


class Coded(torch.Tensor):
    """A tensor of 8 bits, with the scale of each block of elements: torchao keeps the state of optimizers like this."""

    BLOCK = 24

    @staticmethod
    def __new__(cls, codes, _scales, _most):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scales, most):
        self.codes, self.scales, self.most = codes, scales, most

    @classmethod
    def zeros(cls, like):
        codes = torch.zeros_like(like, dtype=torch.int8)
        return cls(codes, torch.zeros(-(-codes.numel() // cls.BLOCK), 1), 127)

    def __tensor_flatten__(self):
        return ["codes", "scales"], (self.most, self.codes.shape)

    @classmethod
    def __tensor_unflatten__(cls, parts, context, _size, _stride):
        most, shape = context
        assert type(shape) is torch.Size
        assert parts["codes"].shape == shape
        return cls(parts["codes"], parts["scales"], most)

    def decoded(self):
        flat = torch.nn.functional.pad(self.codes.flatten().float(), (0, -self.codes.numel() % self.BLOCK))
        return (flat.view(-1, self.BLOCK) * self.scales / self.most).flatten()[: self.codes.numel()].view_as(self.codes)

    def encode(self, values):
        blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % self.BLOCK)).view(-1, self.BLOCK)
        self.scales.copy_(blocks.abs().amax(1, keepdim=True))
        codes = (blocks / self.scales.clamp(min=1e-12) * self.most).round().to(torch.int8)
        self.codes.copy_(codes.flatten()[: values.numel()].view_as(values))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):  # DTensor.from_local
            return cls(args[0].codes, args[0].scales, args[0].most)
        raise NotImplementedError(f"{func} of a {cls.__name__}")


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class OfEightBits(torch.optim.Optimizer):
    """Adam with a first moment of 8 bits, made at the first step, and for large parameters only."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state, own, grad = self.state[parameter], local(parameter), local(parameter.grad)
                if not state:
                    state["mean"] = torch.zeros_like(own) if own.dim() < 2 else Coded.zeros(own)
                    if own.dim() >= 2 and isinstance(parameter, DTensor):
                        state["mean"] = DTensor.from_local(state["mean"], parameter.device_mesh, parameter.placements)
                    state["square"] = torch.zeros_like(own)
                mean = local(state["mean"])
                value = (mean.decoded() if isinstance(mean, Coded) else mean).lerp(grad, 0.1)
                mean.encode(value) if isinstance(mean, Coded) else mean.copy_(value)
                state["square"].lerp_(grad.square(), 0.01)
                own.sub_(group["lr"] * value / (state["square"].sqrt() + 1e-3))
