"""How two agents prove to each other that they have the job's token, without saying it. No sockets here.

    caller                                    listener
    Hello(version, role, nonce)        ->
                                       <-     Challenge(nonce, proof)
    Proof(proof)                       ->
                                       <-     Welcome()          (or Refused(reason) instead of any answer)

A proof is HMAC-SHA256 (RFC 2104) under the token over who proves, the role and both nonces, so that one side's proof is
of no use as the other's, for another role, or in another conversation.
"""

import hmac
import secrets
from enum import StrEnum

from deadpool_run.structs import Tagged
from deadpool_run.wire import typed
from deadpool_run.wire.frames import pack

VERSION = 2
"""Of all that agents say to each other. Agents of two versions refuse each other."""
MAX_BYTES = 4096
"""Of a frame before the other side has proved anything."""
_NONCE_BYTES = 32


class ConnectionRole(StrEnum):
    """What a connection is for."""

    MEMBER = "member"
    """An agent's with the coordinator's: facts one way, orders the other."""
    VAULT = "vault"
    """Between two agents: copies of snapshots."""
    VOTE = "vote"
    """Between two agents: who is to be the coordinator."""


class Hello(Tagged):
    """The first word of whoever connects."""

    version: int
    role: ConnectionRole
    nonce: str


class Challenge(Tagged):
    """The listener's proof, and what the caller has to prove its own with."""

    nonce: str
    proof: str


class Proof(Tagged):
    """The caller's proof."""

    proof: str


class Welcome(Tagged):
    """Both sides know each other; what follows is the role's."""


class GreetingRefused(Tagged):
    """The listener hangs up, and says why."""

    reason: str


Word = Hello | Challenge | Proof | Welcome | GreetingRefused
_DECODER: typed.Decoder[Word] = typed.Decoder(Word, "a word of the greeting")

WRONG_TOKEN = "the tokens are not the same"  # noqa: S105 - no password


class GreetingRefusedError(Exception):
    """The other side is not one of ours, or says that we are none of theirs; the text says why."""


def encode(word: Word) -> bytes:
    """Return the word as one frame."""
    return pack(typed.to_json(word), MAX_BYTES)


def decode(body: bytes) -> Word:
    """Return the word of one frame's body. Raises `ProtocolError`."""
    return _DECODER.decode(body)


class Caller:
    """The side that connects. Say `hello`, then send what `answer` returns until it returns None: then both are sure."""

    def __init__(self, token: bytes, role: ConnectionRole) -> None:
        self._token = token
        self._is_sure = False
        self.hello = Hello(VERSION, role, secrets.token_hex(_NONCE_BYTES))

    def answer(self, heard: Word) -> Word | None:
        """Return what to say to this. Raises `GreetingRefusedError`."""
        match heard:
            case Challenge(nonce, proof):
                if not _is_proof(proof, self._token, "listener", self.hello.role, self.hello.nonce, nonce):
                    raise GreetingRefusedError(WRONG_TOKEN)
                self._is_sure = True
                return Proof(_proof(self._token, "caller", self.hello.role, self.hello.nonce, nonce))
            case Welcome() if self._is_sure:
                return None
            case GreetingRefused(reason):
                raise GreetingRefusedError(reason)
            case _:
                raise GreetingRefusedError(f"it answered with {type(heard).__name__}")


class Listener:
    """The side that was connected to. `role` is set once the caller has said it, and proved once `answer` says Welcome."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._hello: Hello | None = None
        self._nonce = secrets.token_hex(_NONCE_BYTES)

    @property
    def role(self) -> ConnectionRole:
        """What the caller wants."""
        assert self._hello is not None
        return self._hello.role

    def answer(self, heard: Word) -> Word:
        """Return what to say to this; after `Welcome` and `GreetingRefused` nothing more is said."""
        match heard:
            case Hello(version, role, nonce) if self._hello is None:
                if version != VERSION:
                    return GreetingRefused(
                        f"it speaks version {version} of the agents' protocol, and this one {VERSION}"
                    )
                self._hello = heard
                return Challenge(self._nonce, _proof(self._token, "listener", role, nonce, self._nonce))
            case Proof(proof) if self._hello is not None:
                known = _is_proof(proof, self._token, "caller", self._hello.role, self._hello.nonce, self._nonce)
                return Welcome() if known else GreetingRefused(WRONG_TOKEN)
            case _:
                return GreetingRefused(f"{type(heard).__name__} was not expected")


def _proof(token: bytes, side: str, role: ConnectionRole, caller_nonce: str, listener_nonce: str) -> str:
    words = "\n".join((f"deadpool-run agents {VERSION}", side, role, caller_nonce, listener_nonce))
    return hmac.new(token, _bytes(words), "sha256").hexdigest()


def _is_proof(  # noqa: PLR0913, PLR0917 - what a proof is over
    claimed: str, token: bytes, side: str, role: ConnectionRole, caller_nonce: str, listener_nonce: str
) -> bool:
    return hmac.compare_digest(_bytes(claimed), _bytes(_proof(token, side, role, caller_nonce, listener_nonce)))


def _bytes(text: str) -> bytes:
    """Return the text as bytes: JSON can hold what is no proper text, and strangers may say it."""
    return text.encode("utf-8", "surrogatepass")
