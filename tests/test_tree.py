"""The tree stays readable: small folders and modules, a line that says what a folder has, one class for each name."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from kit.tiers import THOROUGH

PACKAGE = Path(__file__).parents[1] / "deadpool_run"
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_a_folder_is_small_and_says_what_it_has(folder):
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 16
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_no_module_is_longer_than_400_lines():
    sizes = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {path: lines for path, lines in sizes.items() if lines > 400} == {}


def test_no_two_public_classes_share_a_name():
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_list_of_thorough_tests_names_tests():
    for each in THOROUGH:
        file, *_, name = each.split("::")
        assert name in (PACKAGE.parent / file).read_text(encoding="utf-8"), each
