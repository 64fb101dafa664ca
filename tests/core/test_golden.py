"""Each script in scripts/ tells a story; its transcript is what the coordinator ordered."""

from pathlib import Path

import pytest
from golden import Run, bless_text

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path, bless):
    text = path.read_text()
    now = bless_text(text)
    if bless:
        path.write_text(now)
    else:
        assert now == text, "decided otherwise; if that is right: pytest tests/core --bless"


def test_there_are_scripts():
    assert len(SCRIPTS) > 10


def test_a_wrong_transcript_is_seen():
    text = SCRIPTS[0].read_text()
    assert bless_text(text.replace("StartWorker", "StartNobody")) != text.replace("StartWorker", "StartNobody")


def test_an_unknown_command_is_refused():
    with pytest.raises(KeyError, match="explode"):
        Run().command("explode w1")
