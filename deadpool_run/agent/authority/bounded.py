"""A time limit around an authority, for storage and name servers that never answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from deadpool_run.agent.authority.claim import AuthorityRecord, ExternalAuthority, LeaderClaim, RunEnd
from deadpool_run.errors import AuthorityError

TIMEOUT_S = 6.0
"""No call takes longer."""
_MAX_PENDING = 8
"""Calls at a time, those included that gave up and whose threads still wait."""

_Answer = TypeVar("_Answer")


class BoundedAuthority:
    """Calls an authority of one run in threads that may be abandoned. Every method raises `AuthorityError`."""

    def __init__(self, authority: ExternalAuthority, run_id: str, timeout_s: float = TIMEOUT_S) -> None:
        self._authority = authority
        self.where = authority.where
        """The authority's place, as `--authority` names it."""
        self.run_id = run_id
        self._timeout_s = timeout_s
        self._free = threading.BoundedSemaphore(_MAX_PENDING)

    def claim(self, claim: LeaderClaim) -> bool:
        """Record the claim; return whether it is the newest."""
        assert claim.run_id == self.run_id, "an authority has the claims of one run"
        return self._within(f"claim term {claim.term}", lambda: self._authority.claim(claim))

    def would_grant(self, claim: LeaderClaim) -> bool:
        """Return whether the claim would be recorded now. Another may be recorded before it."""
        return self.read().answer(claim) is not False

    def read(self) -> AuthorityRecord:
        """Return what is recorded."""
        return self._within("read the run's record", self._authority.read)

    def close_run(self, end: RunEnd) -> None:
        """Record how the run ended, unless that is recorded."""
        self._within("record the run's end", lambda: self._authority.close_run(end))

    def _within(self, what: str, call: Callable[[], _Answer]) -> _Answer:
        if not self._free.acquire(blocking=False):
            raise AuthorityError(
                f"{self.where}: {_MAX_PENDING} earlier requests have no answer yet\n"
                "check that the storage or service answers on this machine"
            )
        answer: Future[_Answer] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                answer.set_exception(error)
            finally:
                self._free.release()

        thread = threading.Thread(target=run, name="deadpool-authority", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not answer.done():
            raise AuthorityError(
                f"{self.where} gave no answer within {self._timeout_s:g} s\n"
                "check that the storage or service answers on this machine"
            )
        try:
            return answer.result()
        except (
            OSError,
            ValueError,
            LookupError,
            AttributeError,
            TypeError,
        ) as error:  # the last ones: JSON of another shape
            raise AuthorityError(f"cannot {what} at {self.where}: {error}\n{self._authority.advice}") from error
