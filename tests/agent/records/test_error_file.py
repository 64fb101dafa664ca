"""The first failure reaches the error file of the launcher itself, with its exit code, as torchrun's does."""

import json

import pytest

from deadpool_run.agent.records.error_file import RootCause
from deadpool_run.ids import WorkerId

FIRST, SECOND, THIRD = WorkerId(1), WorkerId(2), WorkerId(3)


@pytest.fixture
def files(tmp_path):
    def write(name, message, at):
        path = tmp_path / name
        body = {"message": message, "extraInfo": {"timestamp": str(at), "py_callstack": "..."}}
        path.write_text(json.dumps({"message": body}))
        return str(path)

    return write


@pytest.fixture
def own(tmp_path):
    return tmp_path / "own.json"


def published(own):
    return json.loads(own.read_text())["message"] if own.exists() else None


def test_the_earliest_of_all_is_told(own, files):
    cause = RootCause(str(own))
    cause.assigned(FIRST, files("0", "ValueError: a", 2000))
    cause.assigned(SECOND, files("1", "ValueError: b", 1000))
    cause.ended(FIRST, 1, None)
    cause.ended(SECOND, None, 11)
    cause.publish()
    assert (published(own)["message"], published(own)["errorCode"]) == ("ValueError: b", -11)
    assert [path.name for path in own.parent.iterdir() if path.name.startswith("own")] == ["own.json"]


def test_the_first_without_an_error_file_leaves_none(own, files, tmp_path):
    cause = RootCause(str(own))
    cause.assigned(FIRST, str(tmp_path / "absent"))
    cause.assigned(SECOND, files("1", "ValueError: b", 9_999_999_999))
    cause.ended(FIRST, 7, None)
    cause.ended(SECOND, 1, None)
    cause.publish()
    assert published(own) is None


def test_what_was_made_up_for_is_not_told(own, files):
    cause = RootCause(str(own))
    path = files("0", "ValueError: a", 1)
    cause.assigned(FIRST, path)
    cause.ended(FIRST, 1, None)
    cause.assigned(SECOND, path)  # a spare in its place
    cause.ended(SECOND, 0, None)
    cause.publish()
    cause.assigned(THIRD, path)
    cause.ended(THIRD, 1, None)
    cause.begin()  # the whole world again
    cause.publish()
    assert published(own) is None


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[]", "{}", '{"message": 7}', '{"message": {"extraInfo": {"timestamp": "x"}}}']
)
def test_any_error_file_is_survived(own, tmp_path, text):
    path = tmp_path / "error.json"
    path.write_text(text)
    cause = RootCause(str(own))
    cause.assigned(FIRST, str(path))
    cause.ended(FIRST, 1, None)
    cause.publish()
    assert own.exists() == text.startswith('{"')


def test_a_place_that_cannot_be_written_ends_nothing(files, tmp_path, capfd):
    cause = RootCause(str(tmp_path / "no" / "such"))
    cause.assigned(FIRST, files("0", "ValueError: a", 1))
    cause.ended(FIRST, 1, None)
    cause.publish()
    assert "cannot be written" in capfd.readouterr().err
