"""Snapshots of a rank in memory that outlives the worker: captured off the critical path, and restored.

The capture of snapshot k starts when step k ends. State that may change at any time is copied at once. Parameters and
optimizer state change only inside `optimizer.step()`, so another thread copies them during the next forward and backward;
`wait()` before the optimizer's step ends that copy first. A state of at most 4 MiB is copied at once.
"""

import atexit
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from deadpool_run.errors import SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.status_page import StatusPage
from deadpool_run.worker.compat.modules import local, shard_of
from deadpool_run.worker.device.backend import Mark
from deadpool_run.worker.device.choose import device_backend
from deadpool_run.worker.device.run_ahead import wait_idle
from deadpool_run.worker.groups.registry import Registry
from deadpool_run.worker.snapshot import buckets, checks, observed
from deadpool_run.worker.snapshot.copy_thread import CopyThread, OnSkip
from deadpool_run.worker.snapshot.early_writes import EarlyWrites
from deadpool_run.worker.snapshot.plain_state import PlainState
from deadpool_run.worker.snapshot.plan import BufferCopies, CapturePlan, live_tensors
from deadpool_run.worker.snapshot.restore import Restoration
from deadpool_run.worker.snapshot.slots import Slots
from deadpool_run.worker.snapshot.writer import StateCapture, events_now
from deadpool_run.worker.state import script_hooks
from deadpool_run.worker.state.process_settings import ProcessSettings
from deadpool_run.worker.state.protected import Protected
from deadpool_run.worker.state.rng import put_rng, take_rng
from deadpool_run.worker.state.script_environment import ScriptEnvironment
from deadpool_run.worker.state.script_hooks import ScriptHooks
from deadpool_run.worker.transcript.rehearsal import REHEARSAL_STEPS
from deadpool_run.worker.variables.variables import Variables
from deadpool_run.worker.verify.agreement import Agreement


class Snapshots:
    """The snapshots of one rank. For the main thread.

    The slots' descriptors are duplicated; the caller keeps its own. From now on this writes the rank's entry of the status
    page. A slot that a dead predecessor left half-written is emptied.
    """

    def __init__(  # noqa: PLR0913 - memory, status page and callbacks
        self,
        *,
        slot_fds: tuple[int, int],
        status_page: StatusPage,
        rank: Rank,
        on_skip: OnSkip,
        on_captured: Callable[[Version], None] = lambda _: None,
        interval: int = 1,
        interrupted: Callable[[], bool] = lambda: False,
        wrappers: Iterable[DistributedDataParallel] = (),
        workers: int = 1,
    ) -> None:
        """Take over the rank's slots. `workers` is the number of workers of this node.

        `wrappers` are the DDPs of the process: one may be around a protected module. `on_skip` and `on_captured` are called
        on the copy thread, after the status page is updated.

        `interrupted` is called on the copy thread too. Once it is true, no capture waits for a slot any longer, and a step on
        CUDA whose kernels have not ended is not captured, because its collectives may have been aborted. It must become true
        before the first collective is aborted.
        """
        self.interval = interval
        """Steps between captures; may be changed at any time, from any thread."""
        self.protected = Protected(wrappers)
        self.agreement = Agreement(self.protected)
        self.variables = Variables(self.protected.state_tensors)
        self._settings = ProcessSettings()
        self._environment = ScriptEnvironment()
        self._hooks = ScriptHooks()
        self._buffers = BufferCopies()
        self._plan: CapturePlan | None = None
        self._copy_of: Version | None = None
        self._plain: PlainState | None = None
        self._device = device_backend()
        self._mark: Mark | None = None
        self._ended = False
        self.values: dict[str, Any] = {}
        """Our own copy of the small state."""
        self.lost: list[str] = []
        """Why the last restore cannot be exact; empty if it is."""
        self._early_writes = EarlyWrites()
        self._stepped: set[int] = set()
        self._write_counts: list[int] = []
        """`CapturePlan.write_counts()` when the last step ended."""
        self._workers = workers
        self._closed = False
        # A thread that copies during interpreter shutdown would kill the process by a signal.
        atexit.register(self.close)
        self._make_copy_thread = partial(CopyThread, on_skip=on_skip, on_captured=on_captured, interrupted=interrupted)
        self._take_slots(slot_fds, status_page, rank)

    def move(self, slot_fds: tuple[int, int], status_page: StatusPage, rank: Rank) -> None:
        """Take over other slots, with the same objects. Nothing must be under way."""
        self._free_slots()
        self._take_slots(slot_fds, status_page, rank)

    def _take_slots(self, slot_fds: tuple[int, int], status_page: StatusPage, rank: Rank) -> None:
        self._slots = Slots(slot_fds, status_page, rank, self._workers)
        self.copy_thread = self._make_copy_thread(
            memories=self._slots.memories, protected=self.protected, status_page=status_page, rank=rank
        )

    def _free_slots(self) -> None:
        self.copy_thread.close()
        self._plan = None
        self._slots.close()

    def protect(self, name: str, obj: object) -> None:
        """Add `obj` to every later snapshot. Raises `ScriptError` if a snapshot cannot hold it."""
        protected = self.protected
        checks.check_new(name, obj, {*protected.modules, *protected.optimizers, *protected.objects})
        protected.add(name, obj)
        self._plan = None
        if name in protected.modules:
            checks.check_module(protected.modules[name])
        elif name in protected.optimizers:
            checks.check_optimizer(protected.optimizers[name])
        else:
            checks.check_tree(protected.objects[name].state_dict(), name)

    def find_variables(self) -> None:
        """Find the script's variables and settings, as the loop begins: from now on they are part of every snapshot."""
        self._settings.begin()
        self._environment.begin()
        protected = self.protected
        protected.begin()
        scopes: list[Any] = [root for module in protected.modules.values() for root in module.roots()]
        scopes += (each for state in protected.optimizers.values() for each in (state.optimizer, state.keeper))
        parts: list[tuple[str, Any]] = [
            (f"protected {name}.{path}".rstrip("."), child)
            for name, module in protected.modules.items()
            for path, child in module.all_modules()
        ]
        for name, parameter in protected.parameters().items():
            parts.append((f"protected {name}", parameter))
            if local(parameter) is not (shard := shard_of(parameter)):
                parts.append((f"protected {name}, class around it", shard))
        others = [tracked.tensor for tracked in live_tensors(protected).values()]
        self.variables.begin([*scopes, *protected.wrappers, *protected.objects.values()], parts, others)
        parts += ((f"the optimizer {state.name}", state.optimizer) for state in protected.optimizers.values())
        self._hooks.begin(parts, self.variables.own_modules())

    def note_optimizer(self, optimizer: Optimizer, *, has_closure: bool = False) -> None:
        """Note that an optimizer is about to update, and so to use up the gradients of its parameters.

        Refuses that if they are left from the step before, and were lost. A closure may set them first.
        """
        if not has_closure:
            self.protected.left.note_update(each for group in optimizer.param_groups for each in group["params"])
        self._stepped.add(id(optimizer))

    def name_of(self, optimizer: Optimizer) -> str | None:
        """Return the name under which an optimizer is protected; None if it is not."""
        states = self.protected.optimizers.values()
        return next((state.name for state in states if optimizer in (state.optimizer, state.keeper)), None)

    def is_untouched(self) -> bool:
        """Return whether only forward and backward can have changed the objects since the last step ended.

        Torch counts writes. For those that it does not count (through `.data`), and for the optimizers' state, the slot is compared.
        """
        plan = self._plan
        if plan is None or self._early_writes.found or self.protected.has_untrained_module():
            return False
        if plan.write_counts() != self._write_counts or not plan.holds(self.protected, self._buffers):
            return False
        self.wait()
        version = self._copy_of
        if version is None or version not in self.held() or not self._plain_is_still(plan):
            return False
        return plan.is_equal_to(self._slots.memory_of(version))

    def _plain_is_still(self, plan: CapturePlan) -> bool:
        return self._plain is not None and self._plain.is_still(self.protected, plan.names)

    def observe(self) -> dict[str, int]:
        """Return digests of all state that a step changes, by name."""
        return observed.digests(self.protected, self.variables, self._stepped)

    def begin(self, version: Version, *, always: bool = False) -> None:
        """Copy the small state of `version`, and start to copy the rest: at each interval, or `always`.

        Raises the error that made an earlier capture fail.
        """
        self.wait()
        self._take(version)
        if (always or version % self.interval == 0) and version not in self.held():
            self.copy_thread.submit(self._capture(version))

    def end_early(self, *, look: bool) -> None:
        """Wait for the copy now if the script writes parameters before its updates; with `look`, find out whether it does."""
        if look or self._early_writes.found:
            self.wait()
        if look:
            self.look()

    def look(self) -> None:
        """Sample parameters and optimizer state, for `check_writes`."""
        self._early_writes.look(each.tensor for each in self.protected.heavy())

    def check_writes(self) -> None:
        """Before the first update of a step, note whether any of them has changed since `look`."""
        self._early_writes.check()

    def wait(self, *, cancel_pending: bool = True) -> None:
        """Wait for the running copy; with `cancel_pending`, cancel a capture that still waits for a free slot."""
        self.copy_thread.settle(cancel_pending=cancel_pending)

    def capture_now(self, version: Version) -> bool:
        """Capture regardless of the interval, and wait for the copy; return whether the version is held.

        Waits up to a minute for a free slot, or until `interrupted`.
        """
        self.begin(version, always=True)
        self.wait(cancel_pending=False)
        return version in self.held()

    def hold(self, version: Version) -> bool:
        """Wait for the running copy, and capture the version if no slot has it then; return whether it is held."""
        self.wait(cancel_pending=False)
        return version in self.held() or self.capture_now(version)

    def held(self) -> tuple[Version, ...]:
        """Return the complete versions in the slots, oldest first."""
        return self._slots.held()

    def rewind(self, version: Version) -> None:
        """Undo the changes of an interrupted forward; parameters and optimizer state must still be those of `version`.

        Raises `SnapshotError` if our copy of the small state is of another version.
        """
        self.wait()
        self._undo_step()
        if self._copy_of != version:
            raise SnapshotError(
                f"cannot rewind to version {version}: the worker's own copy is of version {self._copy_of}"
            )
        wait_idle(self._device)
        with torch.no_grad():
            self.protected.reset()  # as a restore does: all ranks have to gather alike in the next forward
            self._buffers.put()
            self.protected.put(self.values)
            self._put_rest(self.values)
        put_rng(self.values["rng"])

    def restore(self, version: Version, registry: Registry | None = None) -> None:
        """Set every protected object and the random generators to snapshot `version`.

        With a `registry`, every DDP makes the buckets that the snapshot names. That moves gradients, which are set afterwards.

        Raises `SnapshotError`, before anything is changed, if no slot holds the version or if the snapshot does not fit the
        live objects; the message lists the differences.
        """
        self.wait()
        self._undo_step()
        memory = self._slots.memory_of(version)
        manifest = segments.read_manifest(memory.fd, version)
        memory.ensure(max((offset + nbytes for offset, nbytes in manifest.ranges()), default=0))
        wait_idle(self._device)  # what the interrupted step has left on other streams would write after us
        with torch.no_grad():
            if self._plan is None:
                # Now, not at the first capture: after an evaluation, FSDP2 leaves parameters gathered on every rank, and
                # this would reshard them on this rank only.
                self.protected.refresh(final=False)
            restoration = Restoration(self.protected, memory, manifest)
            restoration.check()
            values = restoration.apply()
            if registry is not None:
                buckets.replay(self.protected, registry)
            self._put_rest(values)
        wait_idle(self._device)
        put_rng(values["rng"])
        self._take(version)

    def keep_evidence(self, path: Path, names: Iterable[str], version: Version) -> None:
        """Save these tensors, as they are at `version` and in the newest snapshot, with `torch.save`."""
        live = live_tensors(self.protected)
        found = {f"version {version}": {name: local(live[name].tensor).detach() for name in names if name in live}}
        self.wait()
        for held in self.held()[-1:]:
            memory = self._slots.memory_of(held)
            entries = {entry.name: entry for entry in segments.read_manifest(memory.fd, held).tensors}
            found[f"version {held}"] = {name: memory.view(entries[name]).clone() for name in names if name in entries}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, path)

    def discard_newer(self, version: Version) -> None:
        """Empty the slots with a newer version, and forget a skip of a newer version."""
        self.wait()
        self._slots.discard_newer(version)

    def close(self) -> None:
        """End the copy thread after its copy, and free memory and descriptors; the slots keep their content."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._free_slots()

    def _undo_step(self) -> None:
        """Forget what is known of a step that is undone, and put back what it has exchanged."""
        self._stepped.clear()
        self.protected.left.unwatch()
        if self._copy_of is not None:
            self.protected.put_back(self.values["members"])
            self._buffers.put_back()

    def _take(self, version: Version) -> None:
        with torch.no_grad():
            self._copy_of = None
            self.values = {}  # free the old copies before new ones are made
            self.protected.left.unwatch()
            if self.protected.follow():
                self._plan = None
            plan = self._plan
            # Query before our own copies are enqueued on the same streams, and only devices in use: a query of another
            # device would open a context there.
            self._ended = plan is not None and all(
                torch.cuda.current_stream(device).query() for device in plan.cuda_devices
            )
            self._mark = None if self._device is None else self._device.mark()
            self._ended &= self._mark is None or self._mark.passed()
            parameters = self.protected.parameters().values() if plan is None else plan.parameters
            self._buffers.take(self.protected)
            self.values = self.protected.take(self._stepped)
            self.values["rng"] = take_rng()
            self.values["settings"] = self._settings.take()
            self.values["environment"] = self._environment.take()
            self.values["variables"] = self.variables.take()
            self.values["hooks"] = hooks = self._hooks.take()
            for name in hooks:
                self.variables.report_unkept(
                    script_hooks.shown(name), "it was registered or removed after the loop began"
                )
            self.values["keeps"] = {
                **self.protected.gradient_facts(parameters, version),
                "unequal": sorted(self.agreement.unequal),
                "early": self._early_writes.found,
                "late": self.protected.late,
            }
            self._stepped.clear()
            self._write_counts = [] if plan is None else plan.write_counts()
            self._copy_of = version

    def _capture(self, version: Version) -> StateCapture:
        """Return the state to write: the live tensors, and what `_take` has copied."""
        plan = self._plan
        if plan is None or not plan.holds(self.protected, self._buffers):
            self.protected.refresh(final=version > REHEARSAL_STEPS)
            plan = self._plan = CapturePlan(self.protected, self._buffers)
            self.protected.state_tensors.forget()
            self._write_counts = plan.write_counts()
        self._plain = PlainState(self.protected, plan.names, has_any=plan.has_plain)
        return StateCapture(
            version=version,
            plan=plan,
            values=self.values,
            plain=self._plain,
            write_counts=self._write_counts,
            # A step's work on another device may write to main memory later than we can read it.
            probes=plan.probe() if self._ended or plan.cuda_devices or self._mark is None else [],
            ready=events_now(plan.cuda_devices),  # behind the probes
            mark=self._mark,
            ended=self._ended or not (plan.cuda_devices or self._mark),
        )

    def _put_rest(self, values: dict[str, Any]) -> None:
        """Set what `Protected.put` leaves: gradients, and what is known of the script."""
        self.protected.state_tensors.forget()
        self._settings.put(values.get("settings", {}))  # a checkpoint of an earlier version has none of these
        self._environment.put(values.get("environment", {}))
        keeps = values["keeps"]
        self.protected.left.refuse = self.variables.refuse
        self.protected.put_gradients(values["gradients"], keeps)  # first: a variable may have the same memory
        self.variables.put(values.get("variables", {}))
        self._hooks.put(values.get("hooks", {}), self.variables.refuse)
        self.agreement.unequal.update(keeps["unequal"])
        self._early_writes.found |= keeps["early"]
        self.lost = keeps.get("late", [])
