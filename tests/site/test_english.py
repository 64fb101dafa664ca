"""Docstrings begin with a noun: "Modules that ...", not "What ..."."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFUSED = ("what ", "who ", "whoever ", "whatever ", "that which ", "one that ")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring, and of each string below a constant or a field."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_docstrings_begin_with_a_noun():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for folder in ("deadpool_run", "tests", "recipes")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(path)
        if text.lower().startswith(REFUSED)
    ]
    assert not found, "\n".join(found)
