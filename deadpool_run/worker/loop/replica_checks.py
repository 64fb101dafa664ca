"""Comparisons of replicas by a loop member: at a repair, in the steps after it, and what follows from a difference."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from deadpool_run.errors import RefusedError, ReplicasDifferError
from deadpool_run.ids import Version
from deadpool_run.worker.groups.registry import Registry
from deadpool_run.worker.process.session import Session
from deadpool_run.worker.snapshot.snapshot import Snapshots
from deadpool_run.worker.verify.agreement import LATE, ReplicaDifference
from deadpool_run.worker.verify.script_names import warn


class ReplicaChecks:
    """Compares this rank's replicas with its peers'. Collective, on the main thread."""

    def __init__(
        self,
        session: Session,
        snapshots: Snapshots,
        registry: Registry,
        refuse: Callable[[str, type[RefusedError]], NoReturn],
    ) -> None:
        self._session = session
        self._snapshots = snapshots
        self._agreement = snapshots.agreement
        self._registry = registry
        self._refuse = refuse

    def learn(self, version: Version) -> None:
        """After attaching: note which replicas differ as before the loss; the others have to stay equal."""
        found = self._agreement.compare(strict=False, is_new=self._session.replacement)
        compared = not self._registry.step_failed
        if found and compared:
            self._stop_for(found, version)
        self._agreement.repaired(version, compared=compared)

    def agree(self, version: Version, total: int) -> bool:
        """Compare replicas, at some versions of `total`; False if a rank was lost meanwhile. Stops the job if a repair made them differ."""
        if not self._agreement.is_due(version, total):
            return True
        steps = self._agreement.steps_since_repair(version)
        with self._registry.unrecorded():
            difference = self._agreement.compare(strict=steps > 0)
        if self._registry.step_failed:
            return False
        if difference is not None:
            self._stop_for(difference, version) if steps <= LATE else self._warn_of(difference, version, steps)
        return True

    def _warn_of(self, difference: ReplicaDifference, version: Version, steps: int) -> None:
        self._agreement.unequal.update(difference.names)
        if self._session.rank == min(difference.ranks):
            warn(
                f"replicas that were equal before a loss differ at version {version}, {steps} steps after its repair: {difference}.\n"
                "If the script does not let them differ on purpose, they are wrong since then: snapshots lack some of its state. "
                "Run `deadpool-run check` on it."
            )

    def _stop_for(self, difference: ReplicaDifference, version: Version) -> NoReturn:
        rank, evidence = self._session.rank, Path(os.environ.get("DEADPOOL_RUN_DIR", "")) / "evidence"
        restored = self._agreement.steps_since_repair(version) == 0  # it may have differed before
        durable = (
            "check a durable checkpoint of this version" if restored else "no durable checkpoint has this difference"
        )
        if rank in difference.odd or rank == min(set(difference.ranks) - set(difference.odd), default=rank):
            self._snapshots.keep_evidence(evidence / f"rank-{rank}.pt", difference.names, version)
        dist.barrier(group=difference.group)  # the first rank that stops the job ends the others
        self._refuse(
            f"replicas that were equal before a loss differ after its repair, at version {version}: {difference}.\n"
            f"The job stops: {durable}. These tensors of the last two versions are kept in {evidence}. "
            "Run `deadpool-run check` on the script to find out why.",
            ReplicasDifferError,
        )
