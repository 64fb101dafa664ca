"""The tables of docs/torchrun.md, made from the cases and the differences: run as a program, it writes them there."""

from collections.abc import Iterator
from pathlib import Path

from compat_cases import CASES, Case
from compat_differences import DIFFERENCES

PAGE = Path(__file__).parents[2] / "docs" / "torchrun.md"
_PLACES = {"{log}": "LOGS", "{port}": "PORT", "{node}": "N", "{home}/": "", "{scripts}/": "$PWD/", "{python}": "python"}


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: made by `python tests/compat/compat_docs.py` -->\n", f"<!-- end of {name} -->"


def section(page: str, name: str) -> str:
    """Return what the page has between the marks."""
    start, end = _marks(name)
    return page.partition(start)[2].partition(end)[0].strip()


def generated(name: str) -> str:
    """Return what it should have there."""
    return "\n".join(_differences() if name == "differences" else _cases()).strip()


def _differences() -> Iterator[str]:
    for name, of in DIFFERENCES.items():
        yield f"- **{name}**: {of.reason}"


def _cases() -> Iterator[str]:
    yield f"{len(CASES)} command lines."
    yield ""
    yield "| case | what follows `torchrun` and `deadpool-run` | differs |"
    yield "| --- | --- | --- |"
    for case in CASES:
        differs = ", ".join(sorted(case.differs)) or "-"
        yield "| " + " | ".join(text.replace("|", "\\|") for text in (case.name, _line(case), differs)) + " |"


def _line(case: Case) -> str:
    line = " ".join((*(f"{name}={value}" for name, value in case.env.items()), case.line))
    for place, shown in _PLACES.items():
        line = line.replace(place, shown)
    words = [f"`{line}`"]
    if case.agents > 1:
        words.append(f"on {case.agents} machines")
    if case.module.endswith("launch"):
        words.append("(after `python -m torch.distributed.launch`)")
    if case.signal:
        words.append(f"then {case.signal}")
    return " ".join(words)


def write() -> None:
    """Bring the page up to date."""
    page = PAGE.read_text()
    for name in ("differences", "cases"):
        start, end = _marks(name)
        before, _, rest = page.partition(start)
        after = rest.partition(end)[2]
        page = f"{before}{start}\n{generated(name)}\n\n{end}{after}"
    PAGE.write_text(page)


if __name__ == "__main__":
    write()
