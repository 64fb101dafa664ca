"""A folder on a shared disk as the authority: one folder for each run, one file for each term."""

import os
from pathlib import Path

from deadpool_run.agent import atomic_file
from deadpool_run.agent.authority.claim import AuthorityRecord, LeaderClaim, RunEnd, from_json, name_of, to_json
from deadpool_run.agent.authority.term_files import TermFiles

_END = "end"


class FileAuthority:
    """Records the claims of a run below a folder that exists. Storage that hangs blocks: see `BoundedAuthority`."""

    def __init__(self, base: Path, run_id: str) -> None:
        self.where = f"file:{base}"
        self.advice = f"{base} must be a writable folder, with hard links, on a disk that all machines of the run share"
        self._folder = base / name_of(run_id)
        self._terms = TermFiles(self._folder, "leader")

    def claim(self, claim: LeaderClaim) -> bool:
        """Record the claim; return whether it is the newest."""
        if (answer := self.read().answer(claim)) is not None:
            return answer
        self._terms.claim(claim.term, to_json(claim))
        return bool(self.read().answer(claim))

    def close_run(self, end: RunEnd) -> None:
        """Record how the run ended, unless that is recorded."""
        self._enter()
        atomic_file.create(self._folder / _END, to_json(end))

    def read(self) -> AuthorityRecord:
        """Return what is recorded."""
        self._enter()
        newest = self._terms.newest()
        try:
            end = from_json((self._folder / _END).read_text(encoding="utf-8"), RunEnd)
        except FileNotFoundError:
            end = None
        return AuthorityRecord(None if newest is None else from_json(newest[1], LeaderClaim), end)

    def _enter(self) -> None:
        """Make the run's folder, but never its parent: on a machine without the shared disk that would be a local folder."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._folder} is owned by another user, who could change the claims")
