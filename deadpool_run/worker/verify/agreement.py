"""Compares replicas after each repair: the tensors that DDP and DTensor keep equal on several ranks.

This is the last check on a repair: a new difference between replicas stops the job. In the first steps after a repair, each
version is compared before a rank captures it. So no durable checkpoint has one that was not compared.

Some tensors differ without a loss, such as weights between two averages. Comparisons without a loss, at growing distances, learn
them, and the snapshot has their names. Buffers are left out: DDP makes them equal at the next forward, if at all.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from deadpool_run.ids import Version
from deadpool_run.text import shortened
from deadpool_run.worker.compat.group_api import GroupApi
from deadpool_run.worker.state.digest import digest, digest_all, sampled
from deadpool_run.worker.state.protected import Protected
from deadpool_run.worker.transcript.rehearsal import REHEARSAL_STEPS
from deadpool_run.worker.verify.coverage import is_sampled

LATE = 8
"""Steps. A difference that is found later after a repair may come from the script: from a phase that lets replicas differ."""

Named = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Tensors that should be equal on replicas and differ, and the ranks that were compared."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    odd: tuple[int, ...]
    """The ranks whose tensors differ from the majority's."""
    group: Any

    def __str__(self) -> str:
        odd, ranks = (", ".join(map(str, each)) for each in (self.odd, self.ranks))
        return f"{shortened(self.names)} on rank {odd} (of ranks {ranks})"


class _Head(NamedTuple):
    """Checksums of the tensors that a rank replicates, for the others."""

    names: int
    """Of all names."""
    compared: int
    """Of the names that are not known to differ."""
    digest: int
    """Of the tensors with these names."""
    is_new: int


class Agreement:
    """Compares the replicas of this rank's tensors. Collective: call it on every rank at the same version."""

    def __init__(self, protected: Protected) -> None:
        self._protected = protected
        self._resumed: Version | None = None
        self._is_evidence = False
        self.unequal: set[str] = set()
        """Names of the tensors that differed without a loss."""

    def repaired(self, version: Version, *, compared: bool) -> None:
        """Note that training resumes at this version after a repair, and whether replicas were `compared` there."""
        self._resumed = version
        self._is_evidence |= compared

    def steps_since_repair(self, version: Version) -> int:
        """Return how many steps the version is away from the last repair; 0 without one."""
        return 0 if self._resumed is None else version - self._resumed

    def is_due(self, version: Version, total: int) -> bool:
        """Return whether replicas are compared at this version of `total`. An optimizer may not update in every step."""
        steps = self.steps_since_repair(version)
        if steps > 0 and (steps <= LATE or is_sampled(steps) or version == total):
            return True
        return version >= REHEARSAL_STEPS and is_sampled(version - 1)

    def compare(self, *, strict: bool, is_new: bool = False) -> ReplicaDifference | None:
        """Return a difference between this rank's tensors and their replicas. Without `strict`, learn the names that differ.

        `is_new`: this process is a replacement. Until it was compared after a repair, it is no evidence of what the script intends.
        """
        found, is_new = None, is_new and not self._is_evidence
        for group, parts in self._by_group():
            # One collective for all parts: the first step after a repair waits for it.
            own = [self._head(tensors, strict=strict, is_new=is_new) for tensors in parts]
            rows = _gathered(torch.tensor(own).flatten(), group)
            for number, tensors in enumerate(parts):
                begin = number * len(own[number])
                heads = [_Head(*row[begin : begin + len(own[number])]) for row in rows]
                found = self._compare_in(group, tensors, heads, strict=strict) or found
        return found

    def _head(self, tensors: Named, *, strict: bool, is_new: bool) -> _Head:
        names = [name for name, _ in tensors]
        compared = self._compared(tensors, strict=strict)
        own = digest_all([tensor for _, tensor in compared])
        return _Head(_crc(names), _crc(name for name, _ in compared), own, int(is_new))

    def _compare_in(
        self, group: dist.ProcessGroup, tensors: Named, heads: Sequence[_Head], *, strict: bool
    ) -> ReplicaDifference | None:
        first = heads[0]
        if any(head.names != first.names for head in heads):
            return None  # not the same tensors on all ranks, as in a sharded optimizer
        if any(head.compared != first.compared for head in heads):
            self._share(group, [name for name, _ in tensors])
            own = self._head(tensors, strict=strict, is_new=bool(heads[dist.get_rank(group)].is_new))
            heads = [_Head(*row) for row in _gathered(torch.tensor(own), group)]
            first = heads[0]
        if any(head.compared != first.compared for head in heads) or all(head.digest == first.digest for head in heads):
            return None  # equal; or a rank was lost meanwhile
        compared = self._compared(tensors, strict=strict)
        table = _gathered(torch.tensor([digest(tensor) for _, tensor in compared]), group)
        columns = {name: column for (name, _), column in zip(compared, zip(*table, strict=True), strict=True)}
        wrong = {name: column for name, column in columns.items() if len(set(column)) > 1}
        if not strict:
            wrong = self._learn(wrong, [bool(head.is_new) for head in heads])
        if not wrong:
            return None
        ranks = dist.get_process_group_ranks(group)
        values = list(zip(*wrong.values(), strict=True))
        usual = max(values, key=values.count)
        odd = tuple(rank for rank, own_values in zip(ranks, values, strict=True) if own_values != usual)
        return ReplicaDifference(tuple(wrong), tuple(ranks), odd, group)

    def _compared(self, tensors: Named, *, strict: bool) -> Named:
        return [(name, tensor if strict else sampled(tensor)) for name, tensor in tensors if name not in self.unequal]

    def _share(self, group: dist.ProcessGroup, names: Sequence[str]) -> None:
        """Add the other ranks' `unequal` to this rank's. A replacement has only the names of its snapshot, which is older."""
        table = _gathered(torch.tensor([int(name in self.unequal) for name in names]), group)
        self.unequal.update(name for name, column in zip(names, zip(*table, strict=True), strict=True) if any(column))

    def _learn(self, wrong: dict[str, tuple[int, ...]], are_new: list[bool]) -> dict[str, tuple[int, ...]]:
        """Learn the names in which ranks differ by intent. Return the others: a repair has made that difference.

        All ranks that are not new agree then. With fewer than two of these, any two ranks that agree show it.
        """
        spoiled = {}
        for name, column in wrong.items():
            old = [value for value, is_new in zip(column, are_new, strict=True) if not is_new]
            agree = len(set(old)) == 1 if len(old) > 1 else len(set(column)) < len(column)
            if agree:
                spoiled[name] = column
        self.unequal.update(wrong.keys() - spoiled.keys())
        return spoiled

    def _by_group(self) -> Iterator[tuple[Any, tuple[Named, Named]]]:
        """Yield each group with the tensors that all its members replicate: parameters, and optimizer state.

        The order is the same on all members, because they run the same program.
        """
        parameters = self._protected.parameters()
        names = {id(parameter): name for name, parameter in parameters.items()}
        under_ddp: dict[int, Any] = {}
        for module in self._protected.modules.values():
            for ddp in module.replicated:
                under_ddp |= {id(parameter): ddp.process_group for parameter in ddp.parameters()}
        held: dict[Any, Named] = {}
        for name, parameter in parameters.items():
            for group in _groups_of(parameter, under_ddp.get(id(parameter))):
                held.setdefault(group, []).append((name, parameter))
        of_optimizers: dict[Any, Named] = {}
        for optimizer in self._protected.optimizers.values():
            for parameter, _, tracked in optimizer.tensors(names):
                for group in _groups_of(tracked.tensor, under_ddp.get(id(parameter))):
                    of_optimizers.setdefault(group, []).append((tracked.name, tracked.tensor))
        for group in dict.fromkeys([*held, *of_optimizers]):
            yield group, (held.get(group, []), of_optimizers.get(group, []))


def _crc(names: Iterable[str]) -> int:
    return zlib.crc32("\n".join(names).encode())


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank of the world. Collective."""
    world = dist.GroupMember.WORLD
    flags = torch.tensor([int(flag)], device=_device_of(world))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    any_set = bool(flags.item())
    return any_set if _holds(world) else flag


def _groups_of(tensor: Tensor, ddp: Any) -> list[Any]:
    """Return the groups whose members all hold the same part of a tensor."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        dims = [
            dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate() and mesh.size(dim) > 1
        ]
        return [mesh.get_group(dim) for dim in dims]
    return [] if ddp is None or ddp.size() < 2 else [ddp]


def _gathered(row: Tensor, group: Any) -> list[list[int]]:
    """Return the row of each member; this rank's own for all if a rank was lost meanwhile."""
    here = row.to(_device_of(group))
    rows = [torch.zeros_like(here) for _ in range(group.size())]
    dist.all_gather(rows, here, group=group)
    found = [each.tolist() for each in rows]
    return found if _holds(group) else [row.tolist()] * len(rows)


def _device_of(group: Any) -> torch.device:
    """Return the device that carries the group's collectives: Gloo's connections may not be needed otherwise."""
    return group.own_device() if isinstance(group, GroupApi) else torch.device("cpu")


def _holds(group: Any) -> bool:
    """Return whether results can be used. Ask when they have been read."""
    return group.results_hold() if isinstance(group, GroupApi) else True
