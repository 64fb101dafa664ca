"""In-memory snapshots of a rank: taken off the critical path into memory that outlives the worker, and put back.

A capture of snapshot k begins when step k ends. What may change at any time is copied there and then; parameters and
optimizer state change only inside `optimizer.step()`, so they are copied by another thread beside the next forward and
backward. `wait()` before the optimizer's step keeps the two apart.
"""

import atexit
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from deadpool_run.errors import SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.segments import SlotRole
from deadpool_run.vault.status_page import EMPTY, StatusPage
from deadpool_run.worker.compat.modules import has_buckets, local
from deadpool_run.worker.groups import ddp_buckets
from deadpool_run.worker.snapshot import checks
from deadpool_run.worker.snapshot.copy_thread import CopyThread
from deadpool_run.worker.snapshot.plan import BufferCopies, CapturePlan
from deadpool_run.worker.snapshot.restore import Restoration
from deadpool_run.worker.snapshot.slot_memory import SlotMemory
from deadpool_run.worker.snapshot.writer import StateCapture, Writer
from deadpool_run.worker.state import gradients, redundancy
from deadpool_run.worker.state.digest import digest, sample, samples_equal
from deadpool_run.worker.state.rng import RngStates, put_rng, take_rng
from deadpool_run.worker.state.state import Protected
from deadpool_run.worker.verify.agreement import Agreement
from deadpool_run.worker.verify.coverage import Coverage

REHEARSED = Version(2)
"""What replacements make before they take their state is what set-up and the steps up to this version make."""


class Snapshots:
    """The snapshots of one rank. All methods are the main thread's.

    The slots' descriptors are duplicated: the caller's stay open and its own. The rank's rank entry of the status page is written
    from here on; a slot that a dead predecessor left half-written is emptied.
    """

    def __init__(  # noqa: PLR0913 - what it reads, writes and tells
        self,
        *,
        slot_fds: tuple[int, int],
        status_page: StatusPage,
        rank: Rank,
        on_skip: Callable[[Version], None],
        on_captured: Callable[[Version], None] = lambda _: None,
        interval: int = 1,
        interrupted: Callable[[], bool] = lambda: False,
        wrappers: Iterable[DistributedDataParallel] = (),
    ) -> None:
        """Take over the rank's slots.

        `wrappers` are the DDPs of the process, of which one may be around a protected module.

        `on_skip` and `on_captured` are called on the copy thread, after the status page says so. So is `interrupted`: once it is true, no capture
        waits for a slot any longer, and a step on CUDA whose kernels had not ended by then is not captured, for its
        collectives may have been aborted. It must be true before the first collective is.
        """
        self.interval = interval
        """Steps between captures; may be changed at any time, from any thread."""
        self._protected = Protected(wrappers)
        self.coverage = Coverage(self._protected)
        self.agreement = Agreement(self._protected)
        self._buffers = BufferCopies()
        self._plan: CapturePlan | None = None
        self._copy_of: Version | None = None
        self._ended = True
        self._values: dict[str, Any] = {}
        self._rng: RngStates | None = None
        self._keeps_grads = False
        self._seen: list[tuple[Tensor, int]] = []
        self._writes_early = False
        """Whether the script writes parameters before its updates, in ways that torch may not count."""
        self._stepped: set[int] = set()
        self._counts: tuple[CapturePlan, list[int]] | None = None
        self._closed = False
        # A thread that copies while the interpreter is taken down would end the process by a signal.
        atexit.register(self.close)
        self._make_copier = partial(CopyThread, on_skip=on_skip, on_captured=on_captured, interrupted=interrupted)
        self._interrupted = interrupted
        self._take_slots(slot_fds, status_page, rank)

    def move(self, slot_fds: tuple[int, int], status_page: StatusPage, rank: Rank) -> None:
        """Take over other slots, with the same objects. Nothing must be under way."""
        self._copier.close()
        for memory in self._memories:
            memory.close()
        self._plan = self._counts = None
        self._take_slots(slot_fds, status_page, rank)

    def _take_slots(self, slot_fds: tuple[int, int], status_page: StatusPage, rank: Rank) -> None:
        self._rank_entry = status_page.rank_entries[rank]
        self._memories = tuple(SlotMemory(fd) for fd in slot_fds)
        complete = segments.complete_versions(slot_fds, self._rank_entry)
        for slot, version in enumerate(self._rank_entry.slots):
            if version not in complete:
                self._rank_entry.set_slot(slot, EMPTY)
        writer = Writer(self._protected, rank, self._interrupted)
        self._copier = self._make_copier(memories=self._memories, writer=writer, status_page=status_page, rank=rank)

    def protect(self, name: str, obj: object) -> None:
        """Make `obj` part of every snapshot from now on. Raises `ScriptError` if none could hold it."""
        obj = checks.GeneratorState(obj) if isinstance(obj, torch.Generator) else obj
        self._protected.add(name, obj)
        self._plan = None
        if name in self._protected.modules:
            checks.check_module(self._protected.modules[name])
        elif name in self._protected.optimizers:
            checks.check_optimizer(self._protected.optimizers[name])
        else:
            checks.check_object(name, obj)

    def has_optimizers(self) -> bool:
        """Say whether an optimizer is protected."""
        return bool(self._protected.optimizers)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to update: it uses up the gradients of its parameters."""
        self._stepped.add(id(optimizer))

    def name_of(self, optimizer: Optimizer) -> str | None:
        """Return the name under which an optimizer is protected; None if it is not."""
        states = self._protected.optimizers.values()
        return next((state.name for state in states if optimizer in (state.optimizer, state.keeper)), None)

    def decided_buckets(self) -> list[bool]:
        """Return of each DDP whether it has decided its buckets."""
        modules = self._protected.modules.values()
        return [has_buckets(ddp) for module in modules for ddp in module.replicated]

    def repeats_alike(self) -> bool:
        """Say whether a step that is run again reduces in the same order: not while DDP has yet to learn a static graph."""
        modules = self._protected.modules.values()
        return all(has_buckets(ddp) or not ddp.static_graph for module in modules for ddp in module.replicated)

    def settle_buckets(self, registry: ddp_buckets.Recorder) -> None:
        """Let every DDP decide its buckets that can by now. A collective: at the end of a step, on every rank."""
        for module in self._protected.modules.values():
            for index, ddp in enumerate(module.replicated):
                module.buckets[index] = ddp_buckets.settle(ddp, registry) or module.buckets[index]

    def tell_buckets(self, registry: ddp_buckets.Recorder) -> None:
        """Have every DDP make the buckets that the others have, which is what a snapshot says that was restored."""
        for module in self._protected.modules.values():
            for ddp, decided in zip(module.replicated, module.buckets, strict=True):
                if decided is not None:
                    ddp_buckets.tell(ddp, decided, registry)

    def is_untouched(self) -> bool:
        """Say whether nothing but forward and backward can have changed the objects since the last step ended.

        Writes that torch counts are seen; of others (through `.data`) a sample is compared with the slot.
        """
        if self._counts is None or self._writes_early or self._protected.is_shadowed():
            return False
        plan, counts = self._counts
        if plan.write_counts() != counts:
            return False
        self.wait()
        if self._copy_of is None or self._copy_of not in self.held():
            return False
        memory = self._memory_of(self._copy_of)
        return all(
            samples_equal(source, kept)
            for source, kept, entry in zip(plan.sources, plan.targets(memory), plan.entries, strict=True)
            if entry.role is SlotRole.PARAMETER
        )

    def find_wrappers(self) -> None:
        """Take in the DDPs that were put around modules after those were protected."""
        for module in self._protected.modules.values():
            module.find_wrappers()

    def observe(self) -> dict[str, int]:
        """Return a digest of each protected tensor as it is now, by name, and of each optimizer's hyper-parameters.

        Gradients count where they are state.
        """
        found = self._named_tensors()
        names = {id(parameter): name for name, parameter in self._protected.parameters().items()}
        for parameter, gradient in self._protected.gradients(self._stepped):
            found[f"the gradient of {names[id(parameter)]}"] = gradient
        rates = {
            f"the hyper-parameters of {name}": zlib.crc32(repr(optimizer.take()).encode())
            for name, optimizer in self._protected.optimizers.items()
        }
        return {name: digest(tensor) for name, tensor in found.items()} | rates

    def likeness(self) -> Rank | None:
        """Return the lowest of the ranks that hold the same parameters as this one; None if it is the only one."""
        return redundancy.likeness(self._protected.modules.values())

    def begin(self, version: Version) -> None:
        """Step `version` has ended: copy what is small, and start the copy of the rest if the interval says so.

        Raises what made an earlier capture fail.
        """
        self.wait()
        self._take(version)
        if version % self.interval == 0 and version not in self.held():
            self._copier.submit(self._capture(version))

    def end_early(self, *, look: bool) -> None:
        """End the copy now, in a script that writes parameters before its updates; with `look`, see whether it does."""
        if look or self._writes_early:
            self.wait()
        if look:
            self.look()

    def look(self) -> None:
        """Note what the parameters are now, for `check_writes`."""
        self._seen = [(parameter, sample(parameter)) for parameter in self._protected.parameters().values()]

    def check_writes(self) -> None:
        """See, before the first update of a step, whether parameters are as `look` noted them."""
        seen, self._seen = self._seen, []
        self._writes_early |= any(sample(parameter) != before for parameter, before in seen)

    def wait(self, *, hurry: bool = True) -> None:
        """Return when no copy is under way; with `hurry`, a capture that still waits for a free slot is given up."""
        self._copier.settle(hurry=hurry)

    def wait_for_peers(self) -> bool:
        """Return when no rank of the node has a copy under way; False if a rank was lost before."""
        return self._copier.settle_peers()

    def wait_for_version(self, version: Version) -> bool:
        """Return when every rank of the node has come to this version and copied it; False if a rank was lost before."""
        return self._copier.settle_version(version)

    def capture_now(self, version: Version) -> bool:
        """Capture whatever the interval is, and return when it is over: True if the version is held.

        Waits for a free slot until `interrupted`, at most for a minute.
        """
        self.wait()
        self._take(version)
        if version not in self.held():
            self._copier.submit(self._capture(version))
            self._copier.settle(hurry=False)
        return version in self.held()

    def held(self) -> tuple[Version, ...]:
        """Return the versions that the slots hold complete, oldest first."""
        return self._rank_entry.held

    def rewind(self, version: Version) -> None:
        """Undo what an interrupted forward changed; parameters and optimizer state must still be those of `version`.

        Raises `SnapshotError` if our own copy of the small values is of another version.
        """
        self.wait()
        self._stepped.clear()
        if self._copy_of != version or self._rng is None:
            raise SnapshotError(f"cannot go back to {version}: the worker's own copy is of {self._copy_of}")
        with torch.no_grad():
            self._protected.reset()  # as those do that restore: the next forward gathers on every rank or on none
            self._buffers.put()
            self._protected.put(self._values)
            self._put_gradients(self._values["gradients"])
            self.agreement.unequal = set(self._values["keeps"]["unequal"])
        put_rng(self._rng)

    def restore(self, version: Version) -> None:
        """Set every protected object and the random generators to snapshot `version`.

        Raises `SnapshotError`, before anything is changed, if the slot does not hold it or if it is not one of objects
        like the live ones; the message says exactly what differs.
        """
        self.wait()
        self._stepped.clear()
        memory = self._memory_of(version)
        manifest = segments.read_manifest(memory.fd, version)
        memory.ensure(max((offset + nbytes for offset, nbytes in manifest.ranges()), default=0))
        with torch.no_grad():
            if self._plan is None:
                # Not with the first capture, which may stand behind an evaluation: what that leaves gathered on every rank
                # would then be freed on this one alone.
                self._protected.refresh(final=False)
            restoration = Restoration(self._protected, memory, manifest)
            restoration.check()
            values, rng = restoration.apply()
            self._keeps_grads = values["keeps"]["gradients"]
            self.agreement.unequal = set(values["keeps"]["unequal"])
            self._writes_early |= values["keeps"]["early"]
            self._put_gradients(values["gradients"])
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        put_rng(rng)
        self._take(version)

    def keep_evidence(self, path: Path, names: Iterable[str], version: Version) -> None:
        """Write these tensors, as they are at `version` and as the newest snapshot has them, into a file of torch's."""
        live = {name: local(tensor).detach() for name, tensor in self._named_tensors().items()}
        found: dict[str, Any] = {f"version {version}": {name: live[name] for name in names if name in live}}
        self.wait()
        for held in self.held()[-1:]:
            memory = self._memory_of(held)
            entries = {entry.name: entry for entry in segments.read_manifest(memory.fd, held).tensors}
            found[f"version {held}"] = {name: memory.view(entries[name]).clone() for name in names if name in entries}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, path)

    def _named_tensors(self) -> dict[str, Tensor]:
        """Return the live parameters, optimizer state and buffers by the names that they have in a snapshot."""
        names = {id(parameter): name for name, parameter in self._protected.parameters().items()}
        found = {tracked.name: tracked.tensor for tracked in self._protected.heavy(names)}
        for (name, _, _), buffer in zip(self._protected.buffers(), self._protected.buffer_values(), strict=True):
            found[name] = buffer
        return found

    def discard_newer(self, version: Version) -> None:
        """Empty every slot that holds a version above this one, and forget skips above it."""
        self.wait()
        for slot, held in enumerate(self._rank_entry.slots):
            if held > version:
                self._rank_entry.set_slot(slot, EMPTY)
                segments.mark_empty(self._memories[slot].fd)
        if self._rank_entry.skipped > version:
            self._rank_entry.skipped = EMPTY

    def close(self) -> None:
        """End the copy thread after the copy under way and give back memory and descriptors; slots keep content."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._copier.close()
            self._plan = self._counts = None
            for memory in self._memories:
                memory.close()

    def _take(self, version: Version) -> None:
        """Make our own copy of everything small."""
        with torch.no_grad():
            self._copy_of = None
            # Before our own copies are enqueued on the same streams.
            # Only on devices in use: asking another one would open a context there.
            devices = () if self._plan is None else self._plan.cuda_devices
            self._ended = self._plan is not None and all(
                torch.cuda.current_stream(device).query() for device in devices
            )
            parameters = self._protected.parameters().values() if self._plan is None else self._plan.parameters
            self._buffers.take(self._protected)
            self._values = self._protected.take(self._stepped)
            self._rng = take_rng()
            self._keeps_grads = any(parameter.grad is not None for parameter in parameters)
            self._values["keeps"] = {
                "gradients": self._keeps_grads,
                "unequal": sorted(self.agreement.unequal),
                "early": self._writes_early,
            }
            self._stepped.clear()
            self._counts = None if self._plan is None else (self._plan, self._plan.write_counts())
            self._copy_of = version

    def _capture(self, version: Version) -> StateCapture:
        """Return the order to capture what is live and what `_take` has copied."""
        assert self._rng is not None
        plan = self._plan
        if plan is None or not plan.holds(self._protected, self._buffers):
            self._protected.refresh(final=version > REHEARSED)
            plan = self._plan = CapturePlan(self._protected, self._buffers)
            self._counts = plan, plan.write_counts()
        assert self._counts is not None  # `_take` has counted, with the same plan
        return StateCapture(
            version=version,
            plan=plan,
            values=self._values,
            rng=self._rng,
            write_counts=self._counts[1],
            ready=tuple(torch.cuda.current_stream(device).record_event() for device in plan.cuda_devices),
            ended=self._ended or not plan.cuda_devices,
        )

    def _memory_of(self, version: Version) -> SlotMemory:
        for slot, held in enumerate(self._rank_entry.slots):
            if held == version:
                return self._memories[slot]
        raise SnapshotError(f"no slot holds snapshot {version}: they hold {list(self.held())}")

    def _put_gradients(self, kept: list[tuple[Tensor, Tensor]]) -> None:
        """Set the gradients that are state; drop the others, or zero them where the script keeps them allocated."""
        gradients.put(self._protected.parameters().values(), kept, zeroed=self._keeps_grads)
