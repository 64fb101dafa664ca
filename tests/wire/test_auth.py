"""A peer without the token learns nothing useful and is refused. A peer with it gets its answer."""

import json
from contextlib import suppress

import msgspec
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
    Credentials,
    GreetingRefused,
    GreetingRefusedError,
    Hello,
    Listener,
    Proof,
    Welcome,
)

TOKEN = b"of the job"
HERE = "10.0.0.1 port 29400"


def caller_of(role=ConnectionRole.MEMBER, token=TOKEN, *, called=HERE, node="n1", run_id=""):
    return Caller(Credentials(token, node, run_id), role, called)


def listener_of(token=TOKEN, *, called=HERE, run_id=""):
    return Listener(Credentials(token, "n0", run_id), called)


def refusal(caller, listener):
    """The reason that the listener gives."""
    refused = sent(listener.answer(sent(caller.answer(sent(listener.answer(sent(caller.hello)))))))
    assert isinstance(refused, GreetingRefused)
    return refused.reason


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
    caller, listener = caller_of(role), listener_of()
    said = greet(caller, listener)
    assert [type(word) for word in said] == [Hello, Challenge, Proof, Welcome]
    assert listener.role is role
    assert TOKEN not in b"".join(map(auth.encode, said))


def test_each_direction_of_each_connection_has_a_key_of_its_own():
    tags = set()
    for _ in range(2):
        caller, listener = caller_of(), listener_of()
        greet(caller, listener)
        (out, back), (answer, heard) = caller.taggers(), listener.taggers()
        heard.check(b"frame", there := out.tag(b"frame"))
        back.check(b"frame", here := answer.tag(b"frame"))
        tags |= {there, here}
    assert len(tags) == 4


def test_the_keys_depend_on_the_token():
    """The nonces alone, which everybody can hear, are not enough."""
    caller, listener = caller_of(), listener_of()
    greet(caller, listener)
    heard = caller._conversation
    other = type(heard)(auth._key(b"another"), *(getattr(heard, name) for name in heard.__slots__[1:]))
    assert other.tagger(auth._Side.CALLER).tag(b"frame") != caller.taggers()[0].tag(b"frame")


def test_a_listener_gives_nothing_but_a_nonce_before_the_caller_has_proved_itself():
    """No proof, no run, no name: one that has not the token has nothing to guess by."""
    listener = listener_of(run_id="secret-run")
    challenge = listener.answer(Hello(VERSION, ConnectionRole.MEMBER, "00"))
    assert isinstance(challenge, Challenge)
    assert Challenge.__struct_fields__ == ("nonce",)
    assert listener.answer(Proof(HERE, "", "n1", "00" * 32)) == GreetingRefused(WRONG_TOKEN)
    assert greet(caller_of(), listener_of(token=TOKEN))[1].nonce != challenge.nonce


def test_a_listener_with_another_token_is_found_out():
    caller, listener = caller_of(), listener_of(b"another")
    assert refusal(caller, listener) == WRONG_TOKEN
    caller = caller_of()
    caller.answer(Challenge("00"))
    with pytest.raises(GreetingRefusedError, match=WRONG_TOKEN):
        caller.answer(Welcome("00" * 32))


def test_a_caller_with_another_token_is_refused():
    assert refusal(caller_of(token=b"another"), listener_of()) == WRONG_TOKEN


def test_an_empty_token_is_no_key_to_another():
    assert refusal(caller_of(token=b""), listener_of()) == WRONG_TOKEN
    listener = listener_of()
    listener.answer(caller_of().hello)
    assert listener.answer(Proof(HERE, "", "", "")) == GreetingRefused(WRONG_TOKEN)


def test_a_proof_that_was_overheard_is_of_no_use_in_another_conversation():
    hello, _, proof, _ = greet(caller_of(), listener_of())
    again = listener_of()
    assert isinstance(again.answer(hello), Challenge)
    assert again.answer(proof) == GreetingRefused(WRONG_TOKEN)


def test_a_welcome_that_was_overheard_is_of_no_use_to_one_who_listens_in_its_place():
    _, challenge, _, welcome = greet(caller_of(), listener_of())
    caller = caller_of()
    caller.answer(challenge)
    with pytest.raises(GreetingRefusedError, match=WRONG_TOKEN):
        caller.answer(welcome)


@pytest.mark.parametrize("role", [ConnectionRole.VAULT, ConnectionRole.VOTE])
def test_a_proof_for_one_role_is_none_for_another(role):
    """Someone between the two changes what the connection is for."""
    caller, listener = caller_of(), listener_of()
    challenge = listener.answer(Hello(VERSION, role, caller.hello.nonce))
    assert listener.answer(caller.answer(challenge)) == GreetingRefused(WRONG_TOKEN)


@pytest.mark.parametrize("field", ["called", "run_id", "node"])
def test_nothing_that_a_proof_covers_can_be_changed_on_its_way(field):
    caller, listener = caller_of(run_id="run"), listener_of(run_id="run")
    proof = caller.answer(listener.answer(caller.hello))
    changed = msgspec.structs.replace(proof, **{field: "other"})
    assert listener.answer(changed) == GreetingRefused(WRONG_TOKEN)


def test_the_fields_of_a_proof_cannot_run_into_each_other():
    one, other = caller_of(run_id="a", node="bc"), caller_of(run_id="ab", node="c")
    other.hello = one.hello
    assert one.answer(Challenge("00")).proof != other.answer(Challenge("00")).proof


def test_a_callers_own_proof_sent_back_to_it_is_none():
    """The listener has no token: it has the caller prove, and says the same."""
    caller = caller_of()
    proof = caller.answer(Challenge("00"))
    with pytest.raises(GreetingRefusedError, match=WRONG_TOKEN):
        caller.answer(Welcome(proof.proof))


def test_a_proof_cannot_be_passed_on_to_an_agent_elsewhere():
    """Someone listens with no token where an agent has ended, and passes all words on to another agent."""
    there = "10.0.0.2 port 29400"
    reason = refusal(caller_of(called=HERE), listener_of(called=there))
    assert HERE in reason
    assert there in reason


def test_a_proof_for_one_run_is_none_for_another():
    """The user's own file has one token for all runs, and a port may by now belong to another one."""
    reason = refusal(caller_of(run_id="first"), listener_of(run_id="second"))
    assert "first" in reason
    assert "second" in reason


@pytest.mark.parametrize(("mine", "theirs"), [("", "run"), ("run", ""), ("run", "run"), ("", "")])
def test_one_that_is_in_no_run_yet_may_come_to_any(mine, theirs):
    assert isinstance(greet(caller_of(run_id=mine), listener_of(run_id=theirs))[-1], Welcome)


def test_a_second_challenge_or_proof_is_not_answered():
    caller, listener = caller_of(), listener_of()
    proof = caller.answer(listener.answer(caller.hello))
    with pytest.raises(GreetingRefusedError):
        caller.answer(Challenge("00"))
    assert isinstance(listener.answer(proof), Welcome)
    assert isinstance(listener.answer(proof), GreetingRefused)


def test_a_callers_nonce_is_new_each_time():
    assert len({caller_of().hello.nonce for _ in range(100)}) == 100
    assert len({listener_of()._nonce for _ in range(100)}) == 100
    assert len(caller_of().hello.nonce) >= 32


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1, -1])
def test_another_version_is_refused_by_its_number(version):
    refused = listener_of().answer(Hello(version, ConnectionRole.MEMBER, "00"))
    assert isinstance(refused, GreetingRefused)
    assert str(version) in refused.reason
    assert str(VERSION) in refused.reason
    with pytest.raises(GreetingRefusedError, match=f"version {version} "):
        caller_of().answer(refused)


@pytest.mark.parametrize("first", [Proof(HERE, "", "", "00"), Challenge("00"), Welcome("00"), GreetingRefused("no")])
def test_nothing_but_a_hello_begins(first):
    assert isinstance(listener_of().answer(first), GreetingRefused)


def test_a_second_hello_does_not_change_what_was_said():
    caller, listener = caller_of(), listener_of()
    listener.answer(caller.hello)
    assert isinstance(listener.answer(Hello(VERSION, ConnectionRole.VAULT, caller.hello.nonce)), GreetingRefused)
    assert listener.role is ConnectionRole.MEMBER


@pytest.mark.parametrize("word", [Hello(VERSION, ConnectionRole.MEMBER, "00"), Proof(HERE, "", "", "00")])
def test_a_caller_takes_no_callers_words(word):
    with pytest.raises(GreetingRefusedError, match=type(word).__name__):
        caller_of().answer(word)


def test_a_welcome_before_the_listener_has_proved_itself_is_none():
    with pytest.raises(GreetingRefusedError):
        caller_of().answer(Welcome("00"))


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
@example(["hello", Proof("\ud800", "\ud800", "\ud800", "\ud800")], "")
@example([Hello(VERSION, ConnectionRole.MEMBER, "\ud800")], "")
@example([Hello(VERSION, ConnectionRole.MEMBER, "\n"), Proof("", "", "", "ä")], "")
def test_whatever_is_said_a_listener_answers_and_lets_nobody_in(words, proof):
    listener = listener_of()
    for word in words:
        named = (
            {"hello": Hello(VERSION, ConnectionRole.MEMBER, "00"), "proof": Proof(HERE, "", "n", proof)}.get(word, word)
            if isinstance(word, str)
            else word
        )
        answer = sent(listener.answer(sent(named)))
        assert isinstance(answer, Challenge | GreetingRefused)


@given(st.lists(WORDS, min_size=1, max_size=4))
@example([Challenge("\ud800"), Welcome("\ud800")])
@example([Challenge(""), Welcome("")])
def test_whatever_is_answered_a_caller_is_not_led_on(words):
    caller = caller_of()
    with suppress(GreetingRefusedError):
        for word in words:
            assert isinstance(caller.answer(sent(word)), Proof)
