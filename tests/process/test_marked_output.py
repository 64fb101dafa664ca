"""Lines that a survivor prints in the rest of a step that a loss has interrupted: their values are wrong, and they are marked."""

import re

from kit.cluster import Cluster


def told(text: str, prefix: str) -> list[tuple[str, ...]]:
    """Return number, place and value of each line with a prefix."""
    return re.findall(rf"^{re.escape(prefix)}step (\d+) (\w+) (.*)$", text, re.MULTILINE)


def test_only_lines_without_a_mark_count(cluster, tmp_path):
    lost: Cluster = cluster(str(tmp_path / "flag"), script="printing.py", nproc=2, spares=1)
    assert lost.wait_exit() == 0, lost.told()
    flag = tmp_path / "was lost"
    flag.touch()
    whole: Cluster = cluster(str(flag), script="printing.py", nproc=2, spares=1)
    assert whole.wait_exit() == 0, whole.told()
    for stream in ("stdout", "stderr"):
        assert set(told(getattr(lost, stream), "")) == set(told(getattr(whole, stream), ""))
        marked = told(getattr(lost, stream), "[interrupted] ")
        assert {number for number, _, _ in marked} == {"5"}, lost.told()
        assert not told(getattr(whole, stream), "[interrupted] ")
    assert [place for _, place, _ in told(lost.stdout, "[interrupted] ")] == ["in", "after"]
