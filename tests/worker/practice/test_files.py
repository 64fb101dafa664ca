"""A run for practice leaves the files that exist as they were; what is still open goes on with them when it is over."""

import functools
import io
import json
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.world import LIMIT_S

from deadpool_run.worker.practice import files
from deadpool_run.worker.practice.files import FileCopies, Kind

BUILTIN = open, io.open, os.open, os.rename, os.replace, os.remove, os.unlink


@pytest.fixture
def copies():
    made = FileCopies()
    yield made
    made.end()
    assert (open, io.open, os.open, os.rename, os.replace, os.remove, os.unlink) == BUILTIN


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "best.json"
    made.write_text("of step 500\n")
    return made


def rewrite(path):
    path.write_text("of step 0\n")


def append(path):
    with path.open("a") as file:
        file.write("of step 0\n")


def write_at(path):
    with open(path, "r+b") as file:  # noqa: PTH123 - as a script does
        file.seek(3)
        file.write(b"STEP")


def through_descriptor(path):
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"of step 0")
    os.close(fd)


def by_renaming(path):
    draft = path.with_suffix(".draft")
    draft.write_text("of step 0")
    draft.replace(path)


def by_renaming_an_exclusive(path):
    draft = path.with_suffix(".draft")
    with draft.open("x") as file:
        file.write("of step 0")
    os.rename(draft, path)  # noqa: PTH104 - as a script does


def with_torch(path):
    torch.save({"weights": torch.zeros(3)}, path)


def with_numpy(path):
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def twice_and_removed(path):
    rewrite(path)
    path.unlink()
    assert not_there(path)
    rewrite(path)


def rotated(path):
    older = path.with_suffix(".older")
    older.write_text("of step 400\n")
    path.replace(older)
    assert not_there(path)
    assert older.read_text() == "of step 500\n"
    rewrite(path)


def open_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def not_there(path):
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    return True


WAYS = [
    rewrite,
    append,
    write_at,
    through_descriptor,
    by_renaming,
    by_renaming_an_exclusive,
    with_torch,
    with_numpy,
    twice_and_removed,
    rotated,
]


@pytest.mark.parametrize("write", WAYS)
def test_a_file_that_exists_is_as_it_was_afterwards(copies, path, write):
    copies.begin(Kind.REHEARSAL)
    write(path)
    assert path.read_bytes() != b"of step 500\n"
    copies.end()
    assert path.read_bytes() == b"of step 500\n"


@pytest.mark.parametrize("write", [way for way in WAYS if way not in (write_at, append, rotated, through_descriptor)])
def test_a_new_file_stays(copies, path, write):
    path.unlink()
    copies.begin(Kind.REHEARSAL)
    write(path)
    now = path.read_bytes()
    write(path)
    copies.end()
    assert path.read_bytes() == now


def test_a_link_is_followed(copies, path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    copies.begin(Kind.REHEARSAL)
    rewrite(link)
    assert path.read_text() == "of step 0\n"
    copies.end()
    assert path.read_text() == "of step 500\n"


def test_a_log_that_stays_open_goes_on_at_the_end_of_the_file(copies, path):
    for mode in ("w", "a"):
        copies.begin(Kind.REHEARSAL)
        handler = logging.FileHandler(path, mode=mode)
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "for practice", (), None))
        with open(path) as reading:  # noqa: PTH123 - as a script does
            assert "for practice" in reading.read()
        copies.end()
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, f"true, {mode}", (), None))
        handler.close()
    assert path.read_text() == "of step 500\ntrue, w\ntrue, a\n"


def test_text_that_was_not_flushed_is_not_written_later(copies, path):
    copies.begin(Kind.REHEARSAL)
    file = path.open("w")
    file.write("for practice\n")
    copies.end()
    file.write("true\n")
    file.close()
    assert path.read_text() == "of step 500\ntrue\n"


def test_a_reader_that_stays_open_reads_the_file_from_where_it_is(copies, path):
    copies.begin(Kind.REHEARSAL)
    rewrite(path)
    reader = open(path, "rb", buffering=0)  # noqa: PTH123, SIM115 - as a script does
    assert reader.read(3) == b"of "
    copies.end()
    assert reader.read() == b"step 500\n"
    reader.close()


def test_large_files_are_truncated_in_copies_but_changed_in_place(copies, path, monkeypatch):
    monkeypatch.setattr(files, "MOST_COPIED", 4)
    copies.begin(Kind.REHEARSAL)
    append(path)
    rewrite(path)
    copies.end()
    assert path.read_text() == "of step 500\nof step 0\n"


def test_an_empty_file_keeps_its_name_because_it_may_be_a_lock(copies, path):
    path.write_bytes(b"")
    copies.begin(Kind.REHEARSAL)
    with path.open("w") as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())


def test_in_the_trial_only_what_is_appended_or_was_read_before_is_copied(copies, path, tmp_path):
    appended, counted = tmp_path / "log", tmp_path / "count.json"
    for each in (appended, counted):
        each.write_text("1")
    copies.begin(Kind.TRIAL)
    rewrite(path)
    append(appended)
    count = json.loads(counted.read_text())
    counted.write_text(json.dumps(count + 1))
    copies.end()
    assert [each.read_text() for each in (path, appended, counted)] == ["of step 0\n", "1", "1"]


@pytest.mark.parametrize("in_trial", [False, True])
def test_an_interrupted_step_leaves_no_new_files(copies, path, tmp_path, in_trial):
    if in_trial:
        copies.begin(Kind.TRIAL)
    copies.begin(Kind.INTERRUPTED)
    rewrite(path)
    by_renaming(tmp_path / "second")
    by_renaming_an_exclusive(tmp_path / "third")
    log = (tmp_path / "log").open("w")
    log.write("wrong\n")
    copies.end_interrupted()
    log.close()
    assert path.read_text() == "of step 500\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["best.json", "log"]


def test_a_rehearsal_goes_on_when_a_collective_gets_no_result(copies, path, tmp_path):
    copies.begin(Kind.REHEARSAL)
    copies.begin(Kind.INTERRUPTED)
    (tmp_path / "new").write_text("needed later")
    copies.end_interrupted()
    rewrite(path)
    copies.end()
    assert (path.read_text(), (tmp_path / "new").read_text()) == ("of step 500\n", "needed later")


def test_a_forked_process_writes_to_the_files(copies, path):
    copies.begin(Kind.REHEARSAL)
    pid = os.fork()
    if pid == 0:
        try:
            rewrite(path)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert path.read_text() == "of step 0\n"


def test_threads_write_to_the_same_copy(copies, path):
    copies.begin(Kind.REHEARSAL)
    thread = threading.Thread(target=rewrite, args=(path,))
    thread.start()
    thread.join(LIMIT_S)
    assert path.read_text() == "of step 0\n"
    copies.end()
    assert path.read_text() == "of step 500\n"


def test_another_thread_saves_during_an_interrupted_step(copies, path, tmp_path):
    copies.begin(Kind.INTERRUPTED)
    for each in (path, tmp_path / "new", tmp_path / "renamed"):
        thread = threading.Thread(target=by_renaming if each.name == "renamed" else rewrite, args=(each,))
        thread.start()
        thread.join(LIMIT_S)
    copies.end_interrupted()
    assert {each.name for each in tmp_path.iterdir()} == {"best.json", "new", "renamed"}
    assert path.read_text() == "of step 0\n"


def test_nothing_is_left_beside_the_files(copies, path, tmp_path):
    before = open_descriptors()
    for write in (twice_and_removed, rotated, by_renaming):
        copies.begin(Kind.REHEARSAL)
        write(path)
        copies.end()
    (tmp_path / "best.older").unlink()
    assert [each.name for each in tmp_path.iterdir()] == ["best.json"]
    assert open_descriptors() == before


def test_a_function_that_a_library_has_replaced_meanwhile_is_left(copies, path):
    copies.begin(Kind.REHEARSAL)
    theirs = os.replace = functools.partial(os.replace)
    copies.end()
    assert os.replace is theirs
    os.replace = BUILTIN[4]
    draft = path.with_suffix(".draft")
    draft.write_text("written as always")
    theirs(draft, path)
    assert path.read_text() == "written as always"
