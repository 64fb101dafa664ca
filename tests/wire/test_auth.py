"""Whoever has not the token learns nothing that would help, and is not let in; whoever has it gets what it asked for."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deadpool_run.errors import ProtocolError
from deadpool_run.wire import auth
from deadpool_run.wire.auth import (
    VERSION,
    WRONG_TOKEN,
    Caller,
    Challenge,
    ConnectionRole,
    GreetingRefused,
    GreetingRefusedError,
    Hello,
    Listener,
    Proof,
    Welcome,
)

TOKEN = b"of the job"


def greet(caller, listener):
    """Carry words to and fro, as bytes, until one of them has nothing more to say; return all that was said."""
    said = [caller.hello]
    while True:
        said.append(sent(listener.answer(sent(said[-1]))))
        answer = caller.answer(said[-1])
        if answer is None:
            return said
        said.append(answer)


def sent(word):
    frame = auth.encode(word)
    assert len(frame) <= 4 + auth.MAX_BYTES
    return auth.decode(frame[4:])


@pytest.mark.parametrize("role", list(ConnectionRole))
def test_two_that_have_the_token_are_sure_of_each_other_and_never_say_it(role):
    caller, listener = Caller(TOKEN, role), Listener(TOKEN)
    said = greet(caller, listener)
    assert [type(word) for word in said] == [Hello, Challenge, Proof, Welcome]
    assert listener.role is role
    assert TOKEN not in b"".join(map(auth.encode, said))


def test_a_listener_with_another_token_is_found_out_before_the_caller_proves_anything():
    caller, listener = Caller(TOKEN, ConnectionRole.MEMBER), Listener(b"another")
    with pytest.raises(GreetingRefusedError, match=WRONG_TOKEN):
        caller.answer(listener.answer(caller.hello))


def test_a_caller_with_another_token_is_refused():
    caller, listener = Caller(b"another", ConnectionRole.MEMBER), Listener(TOKEN)
    challenge = listener.answer(caller.hello)
    assert isinstance(challenge, Challenge)
    own = Listener(b"another")  # which it has made for itself, to have a proof by its own token
    own._nonce = challenge.nonce
    proof = caller.answer(own.answer(caller.hello))
    assert listener.answer(proof) == GreetingRefused(WRONG_TOKEN)


def test_an_empty_token_is_no_key_to_another():
    assert isinstance(Listener(TOKEN).answer(Caller(b"", ConnectionRole.MEMBER).hello), Challenge)
    listener = Listener(TOKEN)
    listener.answer(Caller(b"", ConnectionRole.MEMBER).hello)
    assert listener.answer(Proof("")) == GreetingRefused(WRONG_TOKEN)


def test_a_proof_that_was_overheard_is_of_no_use_in_another_conversation():
    hello, _, proof, _ = greet(Caller(TOKEN, ConnectionRole.MEMBER), Listener(TOKEN))
    again = Listener(TOKEN)
    assert isinstance(again.answer(hello), Challenge)
    assert again.answer(proof) == GreetingRefused(WRONG_TOKEN)


def test_a_challenge_that_was_overheard_is_of_no_use_to_one_who_listens_in_its_place():
    _, challenge, _, _ = greet(Caller(TOKEN, ConnectionRole.MEMBER), Listener(TOKEN))
    with pytest.raises(GreetingRefusedError, match=WRONG_TOKEN):
        Caller(TOKEN, ConnectionRole.MEMBER).answer(challenge)


@pytest.mark.parametrize("role", [ConnectionRole.VAULT, ConnectionRole.VOTE])
def test_a_proof_for_one_role_is_none_for_another(role):
    """Someone between the two changes what the connection is for."""
    caller, listener = Caller(TOKEN, ConnectionRole.MEMBER), Listener(TOKEN)
    challenge = listener.answer(Hello(VERSION, role, caller.hello.nonce))
    with pytest.raises(GreetingRefusedError, match=WRONG_TOKEN):
        caller.answer(challenge)
    honest = Listener(TOKEN)
    honest._nonce = listener._nonce
    proof = caller.answer(honest.answer(caller.hello))
    assert listener.answer(proof) == GreetingRefused(WRONG_TOKEN)


def test_a_listeners_own_proof_sent_back_to_it_is_none():
    """The caller has no token: it has the listener prove, and says the same."""
    listener = Listener(TOKEN)
    challenge = listener.answer(Hello(VERSION, ConnectionRole.MEMBER, "0" * 64))
    assert isinstance(challenge, Challenge)
    assert listener.answer(Proof(challenge.proof)) == GreetingRefused(WRONG_TOKEN)


def test_a_listener_cannot_be_had_to_prove_for_one_who_listens_elsewhere():
    """Someone who listens with no token passes on the caller's nonce as his own, and the other's proof as his."""
    caller, other = Caller(TOKEN, ConnectionRole.MEMBER), Listener(TOKEN)
    challenge = other.answer(Hello(VERSION, ConnectionRole.VAULT, caller.hello.nonce))
    with pytest.raises(GreetingRefusedError, match=WRONG_TOKEN):
        caller.answer(challenge)


def test_a_callers_nonce_is_new_each_time():
    assert len({Caller(TOKEN, ConnectionRole.MEMBER).hello.nonce for _ in range(100)}) == 100
    assert len({Listener(TOKEN)._nonce for _ in range(100)}) == 100
    assert len(Caller(TOKEN, ConnectionRole.MEMBER).hello.nonce) >= 32


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1, -1])
def test_another_version_is_refused_by_its_number(version):
    refused = Listener(TOKEN).answer(Hello(version, ConnectionRole.MEMBER, "00"))
    assert isinstance(refused, GreetingRefused)
    assert str(version) in refused.reason
    assert str(VERSION) in refused.reason
    with pytest.raises(GreetingRefusedError, match=f"version {version} "):
        Caller(TOKEN, ConnectionRole.MEMBER).answer(refused)


@pytest.mark.parametrize("first", [Proof("00"), Challenge("00", "00"), Welcome(), GreetingRefused("no")])
def test_nothing_but_a_hello_begins(first):
    assert isinstance(Listener(TOKEN).answer(first), GreetingRefused)


def test_a_second_hello_does_not_change_what_was_said():
    caller, listener = Caller(TOKEN, ConnectionRole.MEMBER), Listener(TOKEN)
    listener.answer(caller.hello)
    assert isinstance(listener.answer(Hello(VERSION, ConnectionRole.VAULT, caller.hello.nonce)), GreetingRefused)
    assert listener.role is ConnectionRole.MEMBER


@pytest.mark.parametrize("word", [Hello(VERSION, ConnectionRole.MEMBER, "00"), Proof("00")])
def test_a_caller_takes_no_callers_words(word):
    with pytest.raises(GreetingRefusedError, match=type(word).__name__):
        Caller(TOKEN, ConnectionRole.MEMBER).answer(word)


def test_a_welcome_before_the_listener_has_proved_itself_is_none():
    with pytest.raises(GreetingRefusedError):
        Caller(TOKEN, ConnectionRole.MEMBER).answer(Welcome())


def test_a_word_too_long_is_not_sent():
    with pytest.raises(ProtocolError):
        auth.encode(GreetingRefused("x" * auth.MAX_BYTES))


WORDS = st.one_of(*map(st.from_type, (Hello, Challenge, Proof, Welcome, GreetingRefused)))


@given(WORDS)
def test_every_word_comes_back_as_it_was(word):
    assert auth.decode(auth.encode(word)[4:]) == word


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["type", "nonce", "proof"]), inner),
)


@given(st.binary() | JSON.map(lambda parts: json.dumps(parts).encode()))
@example(b"")
@example(b"[" * auth.MAX_BYTES)
@example(b'{"a":' * 600)
@example(b'{"type":"Proof","proof":1}')
@example(b'{"type":["Proof"],"proof":"00"}')
@example(b'{"type":"Proof"}')
@example(b'{"type":"Hello","version":1,"role":"king","nonce":"00"}')
@example(b"1" * auth.MAX_BYTES)
def test_anything_else_is_refused_and_harms_nothing(body):
    with pytest.raises(ProtocolError):
        auth.decode(body)


@given(st.lists(WORDS | st.sampled_from(["hello", "proof"]), max_size=6), st.text(st.characters()))
@example(["hello", Proof("\ud800")], "")
@example([Hello(VERSION, ConnectionRole.MEMBER, "\ud800")], "")
@example([Hello(VERSION, ConnectionRole.MEMBER, "\n"), Proof("ä")], "")
def test_whatever_is_said_a_listener_answers_and_lets_nobody_in(words, proof):
    listener = Listener(TOKEN)
    for word in words:
        named = (
            {"hello": Hello(VERSION, ConnectionRole.MEMBER, "00"), "proof": Proof(proof)}.get(word, word)
            if isinstance(word, str)
            else word
        )
        answer = sent(listener.answer(sent(named)))
        assert isinstance(answer, Challenge | GreetingRefused)


@given(WORDS)
@example(Challenge("\ud800", "\ud800"))
def test_whatever_is_answered_a_caller_is_not_led_on(word):
    with pytest.raises(GreetingRefusedError):
        Caller(TOKEN, ConnectionRole.MEMBER).answer(sent(word))
