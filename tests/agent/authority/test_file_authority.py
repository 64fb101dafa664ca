"""Claims in a folder: few files, no term claimed twice after a removal, and storage that fails or hangs."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from deadpool_run.agent.authority.bounded import BoundedAuthority
from deadpool_run.agent.authority.claim import LeaderClaim, name_of
from deadpool_run.agent.authority.file_authority import FileAuthority
from deadpool_run.agent.authority.term_files import TermFiles
from deadpool_run.errors import AuthorityError

STOPS_BEFORE_ITS_LINK = """
import os, signal, sys
from pathlib import Path
from deadpool_run.agent.authority.term_files import TermFiles
sys.addaudithook(lambda event, _: event == "os.link" and os.kill(os.getpid(), signal.SIGSTOP))
print(TermFiles(Path(sys.argv[1]), "leader").claim(int(sys.argv[2]), "late"), flush=True)
"""


def claim(term):
    return LeaderClaim(term, "n", "10.0.0.1", 29400, "run")


def age(folder):
    """Make all files of the folder an hour old."""
    hour_ago = time.time() - 3600
    for path in folder.iterdir():
        os.utime(path, (hour_ago, hour_ago))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def late_claim(folder, term):
    """Start a process that has found a term free, and stops before it claims it."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPS_BEFORE_ITS_LINK, folder, str(term)], stdout=subprocess.PIPE, text=True
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return process


def go_on(process):
    process.send_signal(signal.SIGCONT)
    answer, _ = process.communicate(timeout=30)
    return answer.strip()


def test_old_terms_and_the_drafts_of_the_dead_are_removed(tmp_path):
    terms = TermFiles(tmp_path, "leader")
    dead = late_claim(tmp_path, 0)
    dead.kill()
    dead.communicate(timeout=30)
    assert len(names(tmp_path)) == 1, "its draft"
    for term in range(40):
        age(tmp_path)
        assert terms.claim(term, "text")
    assert names(tmp_path) == sorted(f"leader.{term}" for term in range(31, 40))


def test_young_files_stay(tmp_path):
    terms = TermFiles(tmp_path, "leader")
    for term in range(20):
        assert terms.claim(term, "text")
    assert len(names(tmp_path)) == 20


def test_a_term_that_was_removed_cannot_be_claimed_again(tmp_path):
    terms = TermFiles(tmp_path, "leader")
    assert terms.claim(4, "text")
    late = late_claim(tmp_path, 5)
    for term in range(5, 30):
        age(tmp_path)
        assert terms.claim(term, "text")
    assert "leader.5" not in names(tmp_path)
    assert not any(name.startswith(".") for name in names(tmp_path)), "the late process's draft was as old"
    assert go_on(late) == "", "it fails"
    assert terms.newest() == (29, "text")


def test_a_term_that_was_removed_is_not_granted_though_its_name_is_free(tmp_path):
    terms = TermFiles(tmp_path, "leader")
    assert terms.claim(4, "text")
    late = late_claim(tmp_path, 5)
    for term in range(5, 20):
        assert terms.claim(term, "text")
    (tmp_path / "leader.5").unlink()  # as if it were old, and the draft young
    assert go_on(late) == "False"
    assert terms.newest() == (19, "text")


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    """The shared disk may not be mounted on this machine: a local folder would found a second job."""
    authority = BoundedAuthority(FileAuthority(tmp_path / "shared", "run"), "run")
    for ask in (lambda: authority.claim(claim(0)), authority.read):
        with pytest.raises(AuthorityError, match="disk that all machines of the run share"):
            ask()
    assert names(tmp_path) == []


def test_a_damaged_record_is_an_error_and_not_a_free_term(tmp_path):
    authority = BoundedAuthority(FileAuthority(tmp_path, "run"), "run")
    assert authority.claim(claim(0))
    (tmp_path / name_of("run") / "leader.1").write_text('{"term": 1')
    with pytest.raises(AuthorityError, match=r"cannot claim term 2 .* not a record of deadpool-run"):
        authority.claim(claim(2))


def test_other_files_do_not_matter(tmp_path):
    authority = BoundedAuthority(FileAuthority(tmp_path, "run"), "run")
    assert authority.claim(claim(3))
    for name in ("leader.9.orig", "leader.", "leader.-1", "xleader.9", ".nfs000000001", "leader.9~"):
        (tmp_path / name_of("run") / name).write_text("x")
    assert authority.read().claim == claim(3)


@pytest.mark.parametrize("answer", [[], {}, {"kvs": [1]}, {"kvs": [{"value": 3}]}, {"kvs": [{"value": ""}]}, "x"])
def test_json_of_another_shape_is_an_error_and_no_answer(tmp_path, answer):
    class Odd(FileAuthority):
        def read(self):
            return int(answer["kvs"][0]["value"].strip())

    with pytest.raises(AuthorityError, match="cannot read the run's record"):
        BoundedAuthority(Odd(tmp_path, "run"), "run").read()


def test_storage_that_hangs_is_given_up(tmp_path):
    authority = BoundedAuthority(FileAuthority(tmp_path, "run"), "run", timeout_s=0.05)
    assert authority.read().claim is None
    fifo = tmp_path / name_of("run") / "leader.0"
    os.mkfifo(fifo)  # whoever opens it blocks, like a server that is gone
    for _ in range(8):
        with pytest.raises(AuthorityError, match=r"gave no answer within 0\.05 s"):
            authority.read()
    with pytest.raises(AuthorityError, match="8 earlier requests have no answer yet"):
        authority.claim(claim(1))
    writer = os.open(fifo, os.O_WRONLY)
    fifo.unlink()
    os.close(writer)
    for thread in threading.enumerate():
        if thread.name == "deadpool-authority":
            thread.join(20)
    patient = BoundedAuthority(FileAuthority(tmp_path, "run"), "run")
    assert patient.claim(claim(1))
