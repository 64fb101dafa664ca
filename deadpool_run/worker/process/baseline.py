"""Torch's global state before a run of the script, to be restored for another run in the same process."""

import torch
import torch.distributed as dist

from deadpool_run.worker.compat import loaders, modules
from deadpool_run.worker.state.generators import seed_epoch
from deadpool_run.worker.state.process_settings import ProcessSettings

_CUDA_SEED = 67280421310721
"""The seed of a CUDA generator in a new process (c10::detail, default_rng_seed_val)."""


class TorchBaseline:
    """Torch's global state at one moment."""

    def __init__(self) -> None:
        loaders.note_loaders(seed_epoch)
        self._rng = torch.get_rng_state()
        self._settings = ProcessSettings()
        self._settings.begin()
        self._hooks = [dict(hooks) for hooks in modules.global_hooks()]

    def restore(self) -> None:
        """Restore it; the process groups of the last run are dropped."""
        if dist.is_initialized():  # the groups' owner has freed them; the next world's groups get the same names
            dist.destroy_process_group()
        modules.forget_meshes()
        torch.set_grad_enabled(True)
        torch.clear_autocast_cache()
        self._settings.put({})
        torch.set_default_device(None)
        for hooks, before in zip(modules.global_hooks(), self._hooks, strict=True):
            hooks.clear()
            hooks.update(before)
        torch.set_rng_state(self._rng)
        if torch.cuda.is_initialized():
            for generator in torch.cuda.default_generators:
                generator.manual_seed(_CUDA_SEED)


def begin_again() -> None:
    """Forget the last run's loaders, and return the memory of its tensors to the device."""
    loaders.forget_loaders()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
