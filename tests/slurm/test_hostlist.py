"""Slurm's compressed lists."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.agent.slurm.hostlist import MAX_NODES, expand, expand_counts
from deadpool_run.errors import UsageError

LISTS = {
    "n1": ("n1",),
    "n[1-3,7],g[001-004]": ("n1", "n2", "n3", "n7", "g001", "g002", "g003", "g004"),
    "a[1-2]b[3-4]": ("a1b3", "a1b4", "a2b3", "a2b4"),
    "n[1-2]-ib": ("n1-ib", "n2-ib"),
    "n[1-2].rack[07]": ("n1.rack07", "n2.rack07"),
    "n[8-11]": ("n8", "n9", "n10", "n11"),
    "n[08-11]": ("n08", "n09", "n10", "n11"),
    "n[098-101]": ("n098", "n099", "n100", "n101"),
    "[1-2]": ("1", "2"),
    "login,n[2,1]": ("login", "n2", "n1"),
    "x-1_y": ("x-1_y",),
}


@pytest.mark.parametrize("text", LISTS)
def test_a_list_is_expanded(text):
    assert expand(text) == LISTS[text]


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "n1,", "n[", "n]", "n[1", "n[1-2]]", "n[[1]]", "n[]", "n[1,]", "n[3-1]", "n[a-b]", "n[1-]", "n[-1]"),
        *("n[1-2,3", "n 1", "n[1 -2]", "n[1-2-3]", f"n[0-{MAX_NODES}]", "n[0-999]m[0-999]", "n[1-99999999999]"),
    ],
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(UsageError, match="cannot be read"):
        expand(text)


_names = st.from_regex(r"\A[a-z][a-z0-9-]{0,5}\Z")
_widths = st.integers(1, 4)
_bounds = st.tuples(st.integers(0, 120), st.integers(0, 6))


@st.composite
def _brackets(draw):
    """A bracket and the numbers it stands for."""
    parts, numbers = [], []
    for low, more in draw(st.lists(_bounds, min_size=1, max_size=3)):
        first = str(low).zfill(draw(_widths))
        parts.append(f"{first}-{low + more}" if more else first)
        numbers += [str(number).zfill(len(first)) for number in range(low, low + more + 1)]
    return f"[{','.join(parts)}]", numbers


@st.composite
def _entries(draw):
    """An entry of up to two brackets and the names it stands for."""
    text, choices = "", []
    for _ in range(draw(st.integers(0, 2))):
        name, (bracket, numbers) = draw(_names), draw(_brackets())
        text += name + bracket
        choices += [[name], numbers]
    last = draw(_names)
    return text + last, ["".join(parts) for parts in itertools.product(*choices, [last])]


@given(st.lists(_entries(), min_size=1, max_size=4))
def test_what_was_compressed_comes_back(entries):
    assert expand(",".join(text for text, _ in entries)) == tuple(name for _, names in entries for name in names)


@given(st.text(alphabet="n1-[], 0", max_size=12))
def test_any_text_is_expanded_or_refused(text):
    try:
        names = expand(text)
    except UsageError:
        return
    assert names
    assert all(name and not set(name) & set("[], ") for name in names)


def test_counts_are_expanded_or_refused():
    assert expand_counts("4(x2),1") == (4, 4, 1)
    assert expand_counts("8") == (8,)
    for text in ("", "4(x)", "4x2", "4,", "-1", f"1(x{MAX_NODES + 1})"):
        with pytest.raises(UsageError):
            expand_counts(text)


BEYOND_SLURM = {"n[1-2]-ib", "n[1-2].rack[07]"}
"""Text after a bracket, which `scontrol` 22.05 does not expand, though other tools write it."""


def test_slurm_expands_them_in_the_same_way(shared_lab):
    for text, names in LISTS.items():
        told = shared_lab.run("scontrol", "show", "hostnames", text).stdout.split()
        assert tuple(told) == names or (text in BEYOND_SLURM and not told)
