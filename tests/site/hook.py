"""MkDocs hook: the site also has README.md, as its first page, and the recipes. Their links lead to the site's pages.

In the repository the same links lead to files, so that every page can be read in both places.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
HOME = "index.md"
LINK = re.compile(r"(\]\()([^)#\s]*)((?:#[^)\s]*)?\))")
RECIPE_FILES = (".md", ".py", ".sh", ".sbatch", ".yaml")


def on_files(files, config):
    """Add the pages and files outside of docs/."""
    files.append(File.generated(config, HOME, abs_src_path=str(ROOT / "README.md")))
    recipes = sorted(
        path for path in (ROOT / "recipes").rglob("*") if path.suffix in RECIPE_FILES or is_container(path)
    )
    for path in recipes:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def is_container(path):
    return path.name in {"Containerfile", "apptainer.def"}


def on_page_markdown(markdown, page, config, files):
    """Rewrite links: each is relative to the file in the repository."""
    here = page.file.src_uri
    folder = posixpath.dirname("README.md" if here == HOME else here if here.startswith("recipes/") else f"docs/{here}")

    def rewritten(link):
        before, target, after = link.groups()
        if not target or re.match(r"[a-z]+:", target):
            return link.group(0)
        return before + posixpath.relpath(place_of(folder, target), posixpath.dirname(here) or ".") + after

    return LINK.sub(rewritten, markdown)


def place_of(folder, target):
    """Return the place on the site of a file that a page in this folder of the repository names."""
    path = posixpath.normpath(posixpath.join(folder, target))
    if path == "README.md":
        return HOME
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    return path.removeprefix("docs/")
