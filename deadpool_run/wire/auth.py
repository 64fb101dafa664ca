"""The greeting of two agents: each proves that it has the job's token, without sending it. No sockets here.

    caller                                    listener
    Hello(version, role, nonce)        ->
                                       <-     Challenge(nonce)
    Proof(called, run_id, node, proof) ->
                                       <-     Welcome(proof)     (or GreetingRefused(reason) instead of any answer)

The caller proves first: a stranger learns nothing from a listener except its version. A proof is keyed BLAKE3 under a key that
is derived from the token. It covers the side that proves, the role, the address that was called, the caller's run and node,
and both nonces. So a proof is of no use to the other side, for another role, in another run, in another conversation, or
if someone passes it on to an agent at another address.

Both sides then derive the keys of the connection's two directions from the same values: see `wire.tags`.
"""

import functools
import hmac
import secrets
from dataclasses import dataclass, field
from enum import StrEnum

from blake3 import blake3

from deadpool_run.structs import Tagged
from deadpool_run.text import printable
from deadpool_run.wire import typed
from deadpool_run.wire.frames import MessageFormat
from deadpool_run.wire.tags import KEY_BYTES, Tagger

VERSION = 15
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


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secret that an agent proves to have, and its names."""

    token: bytes = field(repr=False)
    node: str = ""
    run_id: str = ""
    """Empty while the agent is in no run. Then it does not matter in which run the other one is."""


class Hello(Tagged):
    """Opens the greeting, from the caller. It has the same fields in every version, so that the versions can be compared."""

    version: int
    role: ConnectionRole
    nonce: str


class Challenge(Tagged):
    """The listener's nonce, for both proofs."""

    nonce: str


class Proof(Tagged):
    """The caller's proof, and the values that it covers in addition to the nonces."""

    called: str
    """The address and port that the caller dialled."""
    run_id: str
    node: str
    proof: str


class Welcome(Tagged):
    """The listener's proof, which ends the greeting: messages of the role follow."""

    proof: str


class GreetingRefused(Tagged):
    """Ends the greeting with the reason why the listener closes the connection."""

    reason: str


Greeting = Hello | Challenge | Proof | Welcome | GreetingRefused
FORMAT: MessageFormat[Greeting] = MessageFormat(Greeting, "a message of the greeting", MAX_BYTES)
encode, decode = FORMAT.encode, FORMAT.decode

WRONG_TOKEN = "the tokens differ"  # noqa: S105 - no password


class GreetingRefusedError(Exception):
    """The peer is not an agent of this job, or says that this one is not. The text is the reason."""


class _Side(StrEnum):
    CALLER = "caller"
    LISTENER = "listener"


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The source of the proofs and keys of one connection."""

    key: bytes
    role: ConnectionRole
    caller_nonce: str
    listener_nonce: str
    called: str
    run_id: str
    node: str

    def proof(self, side: _Side) -> str:
        return self._digest("proof", side).hex()

    def tagger(self, sender: _Side) -> Tagger:
        return Tagger(self._digest("frames", sender))

    def _digest(self, purpose: str, side: _Side) -> bytes:
        ends = (self.role, self.caller_nonce, self.listener_nonce, self.called, self.run_id, self.node)
        return blake3(typed.to_json((purpose, side, *ends)), key=self.key).digest(KEY_BYTES)


class Caller:
    """The side that connects. Send `hello`, then each result of `answer` until it is None: then both sides are proved."""

    def __init__(self, credentials: Credentials, role: ConnectionRole, called: str) -> None:
        """Prepare to greet the listener at `called`, an address and a port."""
        self._credentials, self._called = credentials, called
        self._conversation: _Conversation | None = None
        self.hello = Hello(VERSION, role, secrets.token_hex(_NONCE_BYTES))

    def answer(self, received: Greeting) -> Greeting | None:
        """Return what to send next, None at the end. Raises `GreetingRefusedError`."""
        match received:
            case Challenge(nonce) if self._conversation is None:
                mine = self._credentials
                self._conversation = _Conversation(
                    _key(mine.token), self.hello.role, self.hello.nonce, nonce, self._called, mine.run_id, mine.node
                )
                return Proof(self._called, mine.run_id, mine.node, self._conversation.proof(_Side.CALLER))
            case Welcome(proof) if self._conversation is not None:
                if not _equal(proof, self._conversation.proof(_Side.LISTENER)):
                    raise GreetingRefusedError(WRONG_TOKEN)
                return None
            case GreetingRefused(reason):
                raise GreetingRefusedError(printable(reason))
            case _:
                raise GreetingRefusedError(f"it answered with an unexpected {type(received).__name__}")

    def taggers(self) -> tuple[Tagger, Tagger]:
        """Return the taggers to send and to receive with, once, at the end of the greeting."""
        assert self._conversation is not None
        return self._conversation.tagger(_Side.CALLER), self._conversation.tagger(_Side.LISTENER)


class Listener:
    """The side that accepts. `role` is known after the caller's `Hello`, and proved once `answer` returns `Welcome`."""

    def __init__(self, credentials: Credentials, called: str) -> None:
        """Prepare to greet a caller that has reached `called`, an address and a port of this agent."""
        self._credentials, self._called = credentials, called
        self._hello: Hello | None = None
        self._nonce = secrets.token_hex(_NONCE_BYTES)
        self._conversation: _Conversation | None = None
        self._welcomed = False

    @property
    def is_over(self) -> bool:
        """Whether the caller is proved, and was welcomed."""
        return self._welcomed

    @property
    def role(self) -> ConnectionRole:
        """The role that the caller asked for."""
        assert self._hello is not None
        return self._hello.role

    def answer(self, received: Greeting) -> Greeting:
        """Return what to send next. `Welcome` and `GreetingRefused` are the last."""
        match received:
            case Hello(version) if self._hello is None:
                if version != VERSION:
                    return GreetingRefused(
                        f"the caller has version {version} of the agents' protocol and the listener version {VERSION}: "
                        "install the same deadpool-run on all machines"
                    )
                self._hello = received
                return Challenge(self._nonce)
            case Proof() if self._hello is not None and self._conversation is None:
                return self._judge(self._hello, received)
            case _:
                return GreetingRefused(f"the caller sent an unexpected {type(received).__name__}")

    def taggers(self) -> tuple[Tagger, Tagger]:
        """Return the taggers to send and to receive with, once, after `Welcome`."""
        assert self._conversation is not None
        return self._conversation.tagger(_Side.LISTENER), self._conversation.tagger(_Side.CALLER)

    def _judge(self, hello: Hello, claim: Proof) -> Greeting:
        mine = self._credentials
        self._conversation = _Conversation(
            _key(mine.token), hello.role, hello.nonce, self._nonce, claim.called, claim.run_id, claim.node
        )
        if not _equal(claim.proof, self._conversation.proof(_Side.CALLER)):
            return GreetingRefused(WRONG_TOKEN)
        if claim.called != self._called:
            return GreetingRefused(
                f"the caller dialled {_short(claim.called)} and reached {self._called}: something between them translates "
                "addresses, or passes connections on"
            )
        if claim.run_id and mine.run_id and claim.run_id != mine.run_id:
            return GreetingRefused(
                f"the caller is in run {_short(claim.run_id)}, and the listener in run {mine.run_id}"
            )
        self._welcomed = True
        return Welcome(self._conversation.proof(_Side.LISTENER))


@functools.lru_cache(maxsize=4)
def _key(token: bytes) -> bytes:
    return blake3(token, derive_key_context=f"deadpool-run agents {VERSION}: greeting").digest()


def _equal(claimed: str, proof: str) -> bool:
    # A stranger may send lone surrogates, which UTF-8 does not have.
    return hmac.compare_digest(claimed.encode("utf-8", "surrogatepass"), proof.encode())


def _short(name: str) -> str:
    return repr(name[:200])
