"""Readers of files and of external authorities' records give a value or their one declared error, for any bytes."""

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.garbage import HARD, JSON, changed, texts
from kit.replay import replay

from deadpool_run.agent.authority import claim
from deadpool_run.agent.authority.claim import AuthorityRecord, LeaderClaim, RunEnd
from deadpool_run.agent.records import error_file
from deadpool_run.agent.rendezvous import leader_file
from deadpool_run.agent.rendezvous.leader_file import LeaderFile
from deadpool_run.coordinator.address import POINTER_NAME
from deadpool_run.coordinator.journal import Journal
from deadpool_run.core.settings import Settings
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import NodeId
from deadpool_run.wire.typed import to_json

LEADER = LeaderFile(1, "n", "host", "10.0.0.1", 29400, "/run")
CLAIM = LeaderClaim(1, NodeId("n"), "10.0.0.1", 29400, "run")


@given(texts() | changed(to_json(LEADER)))
def test_any_leader_file_is_one_or_none(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    (folder / POINTER_NAME).write_bytes(data)
    assert isinstance(leader_file.read(folder), LeaderFile | None)


@given(texts() | changed(claim.to_json(AuthorityRecord(CLAIM, RunEnd(1, "why")))))
@example(b'{"x":' * 20_000)
def test_any_record_of_an_authority_is_one_or_one_error(data):
    text = data.decode(errors="surrogateescape")
    for kind in (LeaderClaim, RunEnd, AuthorityRecord):
        with suppress(ValueError):
            assert isinstance(claim.from_json(text, kind), kind)


EXTRAS = st.fixed_dictionaries({}, optional={"timestamp": JSON | st.just("9" * 400), "x": JSON})
ERRORS = st.fixed_dictionaries(
    {"message": JSON | st.fixed_dictionaries({}, optional={"extraInfo": EXTRAS | JSON})},
    optional={"timestamp": JSON | st.just(float("inf"))},
)


@given(texts(ERRORS | JSON))
@example(b'{"message":{"extraInfo":[]}}')
@example(b'{"message":{"extraInfo":{"timestamp":1e999}}}')
@example(b'{"message":"m","timestamp":' + b"9" * 400 + b"}")
def test_any_error_file_of_a_script_is_one_or_none(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "error.json"
    path.write_bytes(data)
    assert isinstance(error_file._time_of(error_file._read(str(path)), 1.0), float)


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    made = Journal(path, Settings(world_size=2))
    made.close()
    return path.read_bytes()


@given(data=st.data())
def test_any_journal_is_replayed_or_one_error(tmp_path_factory, journal, data):
    first = data.draw(st.just(journal.strip()) | texts() | changed(journal))
    more = data.draw(st.lists(texts(), max_size=3))
    path = tmp_path_factory.getbasetemp() / "journal.jsonl"
    path.write_bytes(b"\n".join([first, *more]))
    with suppress(ProtocolError):
        replay(path)


@pytest.mark.parametrize("line", HARD)
def test_a_line_that_is_hard_to_decode_is_one_error(tmp_path, journal, line):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(journal + line + b"\n")
    with pytest.raises(ProtocolError, match="line 2"):
        replay(path)
