"""Claims to lead a run, and the protocol of an external authority that records them."""

import hashlib
import re
from dataclasses import dataclass
from typing import Protocol, TypeVar

from deadpool_run.errors import ProtocolError
from deadpool_run.ids import NodeId
from deadpool_run.wire import typed

_UNSAFE = re.compile(r"[^a-z0-9]+")
_SLUG, _DIGEST = 40, 16
_MAX_TERM = (1 << 31) - 1
"""A Kubernetes Lease counts its transitions in 32 bits."""

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class LeaderClaim:
    """A node leads the run in this term. Port 0: no node leads, and the run may be started again."""

    term: int
    node: NodeId
    address: str
    port: int
    """Where the leader listens."""
    run_id: str

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that no claim has."""
        if not 0 <= self.term <= _MAX_TERM:
            raise ValueError(f"term {self.term} is not from 0 to {_MAX_TERM}")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port {self.port} is not from 0 to 65535")


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the run ended, for good."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class AuthorityRecord:
    """Everything that an authority knows of one run."""

    claim: LeaderClaim | None = None
    """The claim of the largest term."""
    end: RunEnd | None = None
    """Set once. No claim is recorded after it."""

    def answer(self, claim: LeaderClaim) -> bool | None:
        """Return the answer to a claim; None if it is free and may be recorded.

        A claim that is recorded already is granted again: the first answer to it may have been lost.
        """
        if self.end is not None:
            return False
        if self.claim is None or self.claim.term < claim.term:
            return None
        return self.claim == claim


class ExternalAuthority(Protocol):
    """Records the claims of one run outside its agents. Methods block for a few seconds at most; any thread may call them.

    All raise OSError, ValueError, KeyError or `AuthorityError` if the authority gives no useful answer. Then a claim may have
    been recorded or not: the same claim, made again, tells.
    """

    where: str
    """The authority's place, as `--authority` names it."""
    advice: str
    """Advice if it gives no useful answer."""

    def claim(self, claim: LeaderClaim) -> bool:
        """Record the claim; return whether it is the newest. False: one of the same or a larger term is, or the run is over."""

    def read(self) -> AuthorityRecord:
        """Return what is recorded."""

    def close_run(self, end: RunEnd) -> None:
        """Record how the run ended. The first such record stays; no claim is granted after it."""


def to_json(record: LeaderClaim | RunEnd | AuthorityRecord) -> str:
    """Return the record as text."""
    return typed.to_json(record).decode()


def from_json(text: str, kind: type[_Record]) -> _Record:
    """Return the record of this kind that a text holds. Raises ValueError for any other text."""
    try:
        return typed.from_plain(kind, typed.parse(text))
    except ProtocolError as error:
        raise ValueError(f"not a record of deadpool-run: {error}") from error


def name_of(run_id: str) -> str:
    """Return a name for the run in lower-case letters, digits and dashes; different for different runs."""
    slug = _UNSAFE.sub("-", run_id.lower())[:_SLUG].strip("-")
    digest = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
    return f"{slug}-{digest}" if slug else digest
