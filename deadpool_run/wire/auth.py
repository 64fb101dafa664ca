"""The greeting of two agents: each proves that it has the job's token, without sending it. No sockets here.

    caller                                    listener
    Hello(version, role, nonce)        ->
                                       <-     Challenge(nonce, proof)
    Proof(proof)                       ->
                                       <-     Welcome()          (or GreetingRefused(reason) instead of any answer)

A proof is HMAC-SHA256 (RFC 2104) under the token over the side that proves, the role and both nonces. So a proof is of no use
to the other side, for another role, or in another conversation.
"""

import hmac
import secrets
from enum import StrEnum

from deadpool_run.structs import Tagged
from deadpool_run.wire.frames import MessageFormat

VERSION = 4
"""Version of all messages between agents. Agents of different versions refuse each other."""
MAX_BYTES = 4096
"""Limit of a frame until the peer has proved itself."""
_NONCE_BYTES = 32


class ConnectionRole(StrEnum):
    """The purpose of a connection."""

    MEMBER = "member"
    """From a node's agent to the leader's: events one way, orders the other."""
    VAULT = "vault"
    """Between two agents: copies of snapshots."""
    VOTE = "vote"
    """Between two agents: the election of a leader."""


class Hello(Tagged):
    """Opens the greeting, from the caller."""

    version: int
    role: ConnectionRole
    nonce: str


class Challenge(Tagged):
    """The listener's proof, and the nonce for the caller's."""

    nonce: str
    proof: str


class Proof(Tagged):
    """The caller's proof."""

    proof: str


class Welcome(Tagged):
    """Ends the greeting: messages of the role follow."""


class GreetingRefused(Tagged):
    """Ends the greeting with the reason why the listener closes the connection."""

    reason: str


Greeting = Hello | Challenge | Proof | Welcome | GreetingRefused
_FORMAT: MessageFormat[Greeting] = MessageFormat(Greeting, "a message of the greeting", MAX_BYTES)
encode, decode = _FORMAT.encode, _FORMAT.decode

WRONG_TOKEN = "the tokens differ"  # noqa: S105 - no password


class GreetingRefusedError(Exception):
    """The peer is not an agent of this job, or says that this one is not. The text is the reason."""


class Caller:
    """The side that connects. Send `hello`, then each result of `answer` until it is None: then both sides are proved."""

    def __init__(self, token: bytes, role: ConnectionRole) -> None:
        self._token = token
        self._is_sure = False
        self.hello = Hello(VERSION, role, secrets.token_hex(_NONCE_BYTES))

    def answer(self, received: Greeting) -> Greeting | None:
        """Return what to send next, None at the end. Raises `GreetingRefusedError`."""
        match received:
            case Challenge(nonce, proof):
                if not _equal(proof, _proof(self._token, "listener", self.hello.role, self.hello.nonce, nonce)):
                    raise GreetingRefusedError(WRONG_TOKEN)
                self._is_sure = True
                return Proof(_proof(self._token, "caller", self.hello.role, self.hello.nonce, nonce))
            case Welcome() if self._is_sure:
                return None
            case GreetingRefused(reason):
                raise GreetingRefusedError(reason)
            case _:
                raise GreetingRefusedError(f"it answered with an unexpected {type(received).__name__}")


class Listener:
    """The side that accepts. `role` is known after the caller's `Hello`, and proved once `answer` returns `Welcome`."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._hello: Hello | None = None
        self._nonce = secrets.token_hex(_NONCE_BYTES)

    @property
    def role(self) -> ConnectionRole:
        """The role that the caller asked for."""
        assert self._hello is not None
        return self._hello.role

    def answer(self, received: Greeting) -> Greeting:
        """Return what to send next. `Welcome` and `GreetingRefused` are the last."""
        match received:
            case Hello(version, role, nonce) if self._hello is None:
                if version != VERSION:
                    return GreetingRefused(
                        f"the caller has version {version} of the agents' protocol and the listener version {VERSION}: "
                        "install the same deadpool-run on all machines"
                    )
                self._hello = received
                return Challenge(self._nonce, _proof(self._token, "listener", role, nonce, self._nonce))
            case Proof(proof) if self._hello is not None:
                own = _proof(self._token, "caller", self._hello.role, self._hello.nonce, self._nonce)
                return Welcome() if _equal(proof, own) else GreetingRefused(WRONG_TOKEN)
            case _:
                return GreetingRefused(f"the caller sent an unexpected {type(received).__name__}")


def _proof(token: bytes, side: str, role: ConnectionRole, caller_nonce: str, listener_nonce: str) -> str:
    text = "\n".join((f"deadpool-run agents {VERSION}", side, role, caller_nonce, listener_nonce))
    return hmac.new(token, _bytes(text), "sha256").hexdigest()


def _equal(claimed: str, proof: str) -> bool:
    return hmac.compare_digest(_bytes(claimed), _bytes(proof))


def _bytes(text: str) -> bytes:
    """Return the text as bytes. A stranger may send lone surrogates, which UTF-8 does not have."""
    return text.encode("utf-8", "surrogatepass")
