"""Loads a durable checkpoint with torch alone into a model on one process, and compares it with what was trained."""

import sys

import torch
import torch.distributed.checkpoint as dcp
from layouts import Block, NoisyBlock, stack
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

OPTIMIZERS = {"ddp-full": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, nesterov=True)}


def main(layout, checkpoint, whole):
    torch.manual_seed(99)
    model = stack(NoisyBlock if layout == "ddp-full" else Block)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    optimizer = OPTIMIZERS.get(layout, lambda p: torch.optim.AdamW(p, lr=0.5))(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    wanted = torch.load(whole, weights_only=True)
    found_model, found_optimizer = get_state_dict(model, optimizer)
    assert found_model.keys() == wanted["model"].keys()
    different = [name for name, value in wanted["model"].items() if not torch.equal(found_model[name], value)]
    different += [
        f"{name}/{key}"
        for name, values in wanted["optimizer"]["state"].items()
        for key, value in values.items()
        if not torch.equal(torch.as_tensor(found_optimizer["state"][name][key]), torch.as_tensor(value))
    ]
    assert not different, different
    lr, trained_lr = (tree["param_groups"][0]["lr"] for tree in (found_optimizer, wanted["optimizer"]))
    assert lr == trained_lr, (lr, trained_lr)
    dcp_to_torch_save(checkpoint, f"{whole}.converted")
    converted = torch.load(f"{whole}.converted", weights_only=True)
    assert converted["optimizer"]["param_groups"][0]["lr"] == trained_lr
    assert "deadpool_run" not in sys.modules
    print(f"the same: {len(wanted['model'])} tensors of the model")


main(*sys.argv[1:])
