import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import deadpool_run
from deadpool_run.worker.verify import script_names


def test_a_warning_names_the_scripts_line_also_where_torch_calls_us(recwarn):
    ours = {"__name__": f"{deadpool_run.__name__}.job", "warn": script_names.warn}
    exec("def hook(*_): warn('text')", ours)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    handle = register_optimizer_step_pre_hook(ours["hook"])
    try:
        optimizer.step()
    finally:
        handle.remove()
    line = test_a_warning_names_the_scripts_line_also_where_torch_calls_us.__code__.co_firstlineno + 6
    assert [(each.filename, each.lineno) for each in recwarn] == [(__file__, line)]
