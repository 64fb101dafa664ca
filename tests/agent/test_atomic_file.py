"""Files that are replaced or created as a whole leave nothing else behind."""

import stat

import pytest

from deadpool_run.agent import atomic_file


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "file"
    atomic_file.replace(path, "one")
    atomic_file.replace(path, "two")
    assert (path.read_text(), mode_of(path), names(tmp_path)) == ("two", 0o600, ["file"])


def test_a_name_that_is_taken_stays(tmp_path):
    path = tmp_path / "file"
    assert atomic_file.create(path, "one")
    assert not atomic_file.create(path, "two")
    assert (path.read_text(), mode_of(path), names(tmp_path)) == ("one", 0o600, ["file"])


def test_a_draft_that_cannot_be_renamed_is_removed(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        atomic_file.replace(tmp_path / "file", "one")
    assert names(tmp_path) == ["file"]
