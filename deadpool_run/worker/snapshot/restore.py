"""Restores live objects from a snapshot: compares everything first, then changes everything."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from deadpool_run.errors import SnapshotError
from deadpool_run.vault.segments import Manifest, SlotRole, TensorEntry, read_exactly
from deadpool_run.worker.codec import TreeReader
from deadpool_run.worker.compat.modules import buffers_of, local
from deadpool_run.worker.compat.placements import parse_placements
from deadpool_run.worker.compat.wrapper_tensors import form_of, is_composed
from deadpool_run.worker.snapshot.composed import distributed, made_of
from deadpool_run.worker.snapshot.plan import live_tensors, placement_of
from deadpool_run.worker.snapshot.slot_memory import SlotMemory, copy_fast, dtype_of
from deadpool_run.worker.state.gradients import Kept
from deadpool_run.worker.state.optimizers import OptimizerState, Tracked
from deadpool_run.worker.state.protected import Protected

_SHOWN = 10


class Restoration:
    """One restore of `protected` from the slot `memory`, whose manifest has been read."""

    def __init__(self, protected: Protected, memory: SlotMemory, manifest: Manifest) -> None:
        self._protected = protected
        self._memory = memory
        self._manifest = manifest
        self._parameters = protected.parameters()
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._saved = {entry.name: entry for entry in manifest.tensors}
        self._live = live_tensors(protected)
        self._owners = {name: (module, key) for name, module, key in protected.places()}
        # Of every parameter, not only the optimizer's present ones: a script may have added some later.
        self._state_owners = {
            f"{optimizer.name}/{name}": (optimizer, parameter)
            for optimizer in protected.optimizers.values()
            for name, parameter in self._parameters.items()
        }

    def check(self) -> None:
        """Raise `SnapshotError` if the snapshot does not fit the live objects; changes nothing."""
        found = [*self._differences_of_tensors(), *self._differences_of_values()]
        if found:
            shown = "\n".join(f"  {difference}" for difference in found[:_SHOWN])
            more = f"\n  ... and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise SnapshotError(
                f"snapshot {self._manifest.version} of rank {self._manifest.rank} does not fit the objects of this process:\n"
                f"{shown}{more}\nBuild the same model and optimizer in every process of a rank."
            )

    def apply(self) -> dict[str, Any]:
        """Set everything except gradients and generators; return their states with all other small values."""
        self._protected.reset()
        values = self._values()
        for name, optimizer in self._protected.optimizers.items():
            optimizer.put_members(values["members"][name])
        self._trim_optimizers()
        if any(plain.get("forms") for plain in values["plain"].values()):
            self._form_optimizers(values["plain"])
        targets, sources = [], []
        for entry in self._saved.values():
            targets.append(local(self._target(entry)).detach())
            sources.append(self._memory.view(entry))
        copy_fast(targets, sources)
        for name, optimizer in self._protected.optimizers.items():
            optimizer.put_plain(values["plain"][name], self._names)
        self._protected.put(values)
        return values

    def _target(self, entry: TensorEntry) -> Tensor:
        """Return the tensor to copy an entry into: the live one, or a new one in its place."""
        if entry.role is SlotRole.PARAMETER or not _differences(entry, self._live.get(entry.name)):
            return self._live[entry.name].tensor
        return self._created(entry) if entry.role is SlotRole.OPTIMIZER else self._new_buffer(entry)

    def _new_buffer(self, entry: TensorEntry) -> Tensor:
        """Replace a buffer that is None or, as a lazy one may be, of another shape; return the new one."""
        module, key = self._owners[entry.name]
        live = buffers_of(module)[key]  # may be None
        device = torch.device(entry.device) if live is None else live.device
        made = torch.empty_strided(entry.shape, entry.stride, dtype=dtype_of(entry.dtype), device=device)
        buffers_of(module)[key] = made
        return made

    def _differences_of_tensors(self) -> list[str]:
        found = []
        for name, entry in self._saved.items():
            if entry.role is SlotRole.BUFFER and entry.placement is None and name in self._owners:
                continue  # `_new_buffer` replaces it
            differences = _differences(entry, self._live.get(name))
            found += self._obstacles(entry) if differences and entry.role is SlotRole.OPTIMIZER else differences
        absent = {name for module in self._manifest.values["modules"].values() for name in module["absent"]}
        return found + [
            f"{name}: not in the snapshot"
            for name, tracked in self._live.items()
            if name not in self._saved and name not in absent and tracked.role is not SlotRole.OPTIMIZER
        ]

    def _obstacles(self, entry: TensorEntry) -> list[str]:
        owner, _, _ = entry.name.rpartition("/")
        if owner not in self._state_owners:
            return [f"{entry.name}: in the snapshot only"]
        saved = entry.placement
        if saved is None:
            return []
        _, parameter = self._state_owners[owner]
        own = placement_of(parameter)
        if own is None or (own.mesh, own.names, own.at) != (saved.mesh, saved.names, saved.at):
            return [f"{entry.name}: its placement {saved} is not on the mesh of its parameter ({own})"]
        if own.placements != saved.placements and parse_placements(saved.placements) is None:
            return [f"{entry.name}: cannot be created with the placements {saved.placements}"]
        return []

    def _differences_of_values(self) -> list[str]:
        saved, own = self._manifest.values, self._protected
        found = []
        for kind, live in (("modules", own.modules), ("optimizers", own.optimizers), ("objects", own.objects)):
            found += [f"{name}: not in the snapshot ({kind})" for name in live if name not in saved[kind]]
            found += [f"{name}: in the snapshot only ({kind})" for name in saved[kind] if name not in live]
        for name, module in own.modules.items():
            theirs = saved["modules"].get(name, {"extra": {}, "hooks": []})
            if module.shape() != (frozenset(theirs["extra"]), [len(states) for states in theirs["hooks"]]):
                found.append(
                    f"{name}: different children have extra state, or DDP has different communication hooks, than in the snapshot"
                )
            found += module.obstacles(theirs)
        for name, optimizer in own.optimizers.items():
            found += self._differences_of_groups(name, optimizer, saved["members"].get(name, []))
        return found

    def _differences_of_groups(self, name: str, optimizer: OptimizerState, saved: list[list[str]]) -> list[str]:
        """Return why the groups cannot become those of the snapshot.

        Training may have appended whole groups, and a script that takes parameters out of a set has another order in each process.
        """
        live = [[self._names[id(parameter)] for parameter in group] for group in optimizer.members()]
        if any(sorted(then) != sorted(now) for then, now in zip(saved, live, strict=False)):
            return [f"{name}: {len(live)} groups here and {len(saved)} in the snapshot, of different parameters"]
        unknown = [each for group in saved for each in group if each not in self._parameters]
        return [f"{name}: trains {each} in the snapshot, which does not exist here" for each in unknown]

    def _trim_optimizers(self) -> None:
        for optimizer in self._protected.optimizers.values():
            for parameter, key, tracked in list(optimizer.tensors(self._names)):
                if tracked.name not in self._saved:
                    optimizer.state[parameter].pop(key, None)

    def _form_optimizers(self, plain: dict[str, Any]) -> None:
        """Create tensors that consist of others where there is none here, or one of another form. Their parts are copied later."""
        for name, optimizer in self._protected.optimizers.items():
            for of, forms in plain[name].get("forms", {}).items():
                parameter = self._parameters[of]
                state = optimizer.state[parameter]
                for key, form in forms.items():
                    live = state.get(key)
                    if live is None or not is_composed(live) or form_of(live) != form:
                        state[key] = made_of(form, parameter)
        self._live = live_tensors(self._protected)

    def _created(self, entry: TensorEntry) -> Tensor:
        owner, _, key = entry.name.rpartition("/")
        optimizer, parameter = self._state_owners[owner]
        own = local(parameter)
        device = own.device if entry.device == own.device.type else torch.device(entry.device)
        made = torch.empty_strided(entry.shape, entry.stride, dtype=dtype_of(entry.dtype), device=device)
        if entry.placement is not None:
            made = _distributed(made, entry, parameter)
        optimizer.state[parameter][key] = made
        return made

    def _values(self) -> dict[str, Any]:
        reader = TreeReader(blob=self._blob, tensor=self._tensor)
        like: dict[str, Any] = {}
        if self._manifest.value_tensors:
            like = self._protected.take() | {"gradients": self._parameters}
        values = {
            part: {name: reader.decode(node, like.get(part, {}).get(name)) for name, node in nodes.items()}
            for part, nodes in self._manifest.values.items()
        }
        values["members"] = {
            name: [[self._parameters[parameter] for parameter in group] for group in groups]
            for name, groups in values["members"].items()
        }
        in_buckets = set(values["keeps"].get("in_buckets", ()))
        gradients = [
            Kept(self._parameters[name], gradient, name in in_buckets) for name, gradient in values["gradients"].items()
        ]
        keeps: dict[str, Any] = {"without": [], "lost": []} | values["keeps"]  # an earlier version knew neither
        for part in ("without", "lost"):
            keeps[part] = keeps[part] and [self._parameters[name] for name in keeps[part]]
        return values | {"gradients": gradients, "keeps": keeps}

    def _blob(self, index: int) -> bytes:
        offset, nbytes = self._manifest.blobs[index]
        return read_exactly(self._memory.fd, nbytes, offset)

    def _tensor(self, index: int, like: Any) -> Tensor:
        entry = self._manifest.value_tensors[index]
        device = local(like).device if isinstance(like, Tensor) else torch.device(entry.device)
        made = torch.empty_strided(entry.shape, entry.stride, dtype=dtype_of(entry.dtype), device=device)
        made.copy_(self._memory.view(entry))
        if entry.placement is None:
            return made
        if not isinstance(like, DTensor):
            raise SnapshotError(f"a value of the snapshot has the placement {entry.placement}, the live one has none")
        return _distributed(made, entry, like)


def _differences(entry: TensorEntry, tracked: Tracked | None) -> list[str]:
    if tracked is None:
        return [f"{entry.name}: in the snapshot only"]
    own = local(tracked.tensor)
    pairs = (
        ("is a", entry.role, tracked.role),
        ("has dtype", entry.dtype, str(own.dtype).removeprefix("torch.")),
        ("has shape", entry.shape, tuple(own.shape)),
        ("has the placement", entry.placement, placement_of(tracked.tensor)),
    )
    return [
        f"{entry.name}: {what} {live} here, {saved} in the snapshot" for what, saved, live in pairs if saved != live
    ]


def _distributed(shard: Tensor, entry: TensorEntry, like: Tensor) -> DTensor:
    placement = entry.placement
    assert placement is not None
    return distributed(shard, like, placements=placement.placements, shape=placement.shape, stride=placement.stride)
