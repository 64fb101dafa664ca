"""The buckets of protected DDPs: decided together, kept in snapshots, and replayed in a replacement."""

from deadpool_run.worker.compat.modules import has_buckets
from deadpool_run.worker.groups import ddp_buckets
from deadpool_run.worker.groups.registry import Registry
from deadpool_run.worker.state.protected import Protected


def reduces_repeatably(protected: Protected, *, updated: bool) -> bool:
    """Return whether a repeated step reduces alike: every DDP has its buckets, or decides before it reduces.

    After a forward under no_sync() the first reduction is to come, unless weights were `updated` without one.
    """
    waiting = [ddp for ddp in protected.ddps() if not has_buckets(ddp)]
    return not any(ddp.static_graph or not (updated or ddp.require_forward_param_sync) for ddp in waiting)


def decide(protected: Protected, registry: Registry) -> None:
    """Let every DDP that can decide its buckets. Collective: call it on every rank at the end of a step."""
    for module in protected.modules.values():
        for index, ddp in enumerate(module.replicated):
            decision = ddp_buckets.decide(ddp, registry, protected.views)
            module.buckets[index] = decision or module.buckets[index]


def replay(protected: Protected, registry: Registry) -> None:
    """Give every DDP the buckets that the restored snapshot names."""
    for module in protected.modules.values():
        for ddp, decision in zip(module.replicated, module.buckets, strict=True):
            if decision is not None:
                ddp_buckets.replay(ddp, decision, registry, protected.views)
