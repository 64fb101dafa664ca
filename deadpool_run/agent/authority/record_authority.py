"""A service with compare-and-swap as the authority: one record for each run, replaced as a whole."""

from abc import abstractmethod
from dataclasses import replace
from typing import Generic, TypeVar

from deadpool_run.agent.authority.claim import AuthorityRecord, ExternalAuthority, LeaderClaim, RunEnd
from deadpool_run.errors import AuthorityError

_SWAPS = 100
"""Attempts to replace a record that others replace at the same time. Each failed one is a success of another agent."""

Version = TypeVar("Version")
"""The value that a service compares before it replaces the record."""


class RecordAuthority(ExternalAuthority, Generic[Version]):
    """The record of one run in a service. Methods raise OSError or ValueError if the service gives no useful answer."""

    @abstractmethod
    def fetch(self) -> tuple[AuthorityRecord, Version]:
        """Return the record and its version. A missing record is empty, and has a version too."""

    @abstractmethod
    def swap(self, record: AuthorityRecord, version: Version) -> bool:
        """Replace the record of this version; return whether it was the newest.

        False may also mean that the record was replaced by this call, and that the service's answer was lost.
        """

    def claim(self, claim: LeaderClaim) -> bool:
        """Record the claim; return whether it is the newest."""
        for _ in range(_SWAPS):
            record, version = self.fetch()
            if (answer := record.answer(claim)) is not None:
                return answer
            if self.swap(replace(record, claim=claim), version):
                return True
        raise self._contended()

    def read(self) -> AuthorityRecord:
        """Return what is recorded."""
        return self.fetch()[0]

    def close_run(self, end: RunEnd) -> None:
        """Record how the run ended, unless that is recorded."""
        for _ in range(_SWAPS):
            record, version = self.fetch()
            if record.end is not None or self.swap(replace(record, end=end), version):
                return
        raise self._contended()

    def _contended(self) -> AuthorityError:
        return AuthorityError(f"{self.where}: the run's record changed {_SWAPS} times in a row\ntry again")
