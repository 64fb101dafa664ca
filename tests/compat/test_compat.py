"""deadpool-run is torchrun, but for a written list of differences: each command line runs under both."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from compat_cases import CASES
from compat_differences import DIFFERENCES
from compat_docs import PAGE, generated, section
from compat_launch import Launcher, TorchrunServer, observe

ABSENT = "<absent>"
TORCH = tuple(int(part) for part in version("torch").split(".")[:2])
HERE = [case for case in CASES if case.since <= TORCH]


@pytest.fixture(scope="session")
def server():
    """torchrun, imported once."""
    serving = TorchrunServer()
    yield serving
    serving.close()


def shown(case, theirs, ours):
    """Return the intended differences that were seen, by name, and everything else that differs."""
    seen, rest = set(), {}
    for path in sorted(theirs.keys() | ours.keys()):
        values = theirs.get(path, ABSENT), ours.get(path, ABSENT)
        if values[0] == values[1]:
            continue
        explained = [name for name, of in DIFFERENCES.items() if of.always and of.explains(path, case)]
        explained += [name for name in case.differs if DIFFERENCES[name].explains(path, case)]
        seen.update(explained)
        if not explained:
            rest[path] = values
    return seen, rest


def check(case, theirs, ours):
    seen, rest = shown(case, theirs, ours)
    assert not rest
    assert case.differs <= seen, f"not to be seen any more: {case.differs - seen}"


@pytest.mark.slow
@pytest.mark.timeout(240)  # two launches, each with its bound
@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_as_under_torchrun(case, tmp_path):
    check(case, observe(case, Launcher("theirs"), tmp_path / "t"), observe(case, Launcher("ours"), tmp_path / "o"))


@pytest.mark.parametrize("case", [case for case in HERE if case.quick], ids=lambda case: case.name)
def test_as_under_a_torchrun_that_was_imported_before(case, server, tmp_path):
    """The same of a few, in seconds: torchrun is forked from a process that has imported it."""
    check(
        case, observe(case, Launcher("theirs", server), tmp_path / "t"), observe(case, Launcher("ours"), tmp_path / "o")
    )


def test_cases_and_differences_are_well_formed():
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    named = {name for case in CASES for name in case.differs}
    assert named == {name for name, of in DIFFERENCES.items() if of.where and not of.always}
    for of in DIFFERENCES.values():
        re.compile(of.where)


@pytest.mark.parametrize("name", ["differences", "cases"])
def test_the_page_shows_them(name):
    """`python tests/compat/compat_docs.py` writes them."""
    assert section(PAGE.read_text(), name) == generated(name)


@pytest.mark.slow
def test_every_option_of_torchrun_is_in_some_case():
    """Of its parser, as it is installed."""
    run = pytest.importorskip("torch.distributed.run")
    lines = " ".join(" ".join((case.line, *case.env)) for case in CASES)
    spelled = {word.partition("=")[0].replace("_", "-") for word in lines.split() if word.startswith("-")}
    spelled |= {
        "--" + name.removeprefix("PET_").lower().replace("_", "-") for name in lines.split() if name.startswith("PET_")
    }
    missing = {
        action.option_strings[0]
        for action in run.get_args_parser()._actions
        if action.option_strings and not {one.replace("_", "-") for one in action.option_strings} & spelled
    }
    assert not missing


def test_the_readme_leads_to_the_page():
    assert "docs/torchrun.md" in (Path(PAGE).parents[1] / "README.md").read_text()
