"""Take the picture of the documentation's site: docs/pictures/site.png, a page of build/site.

    make docs && python tests/pictures/documentation.py

It needs Chromium. Run it again when the site looks different.
"""

import sys

from browser import PICTURES, take

SITE = PICTURES.parents[1] / "build" / "site"
PAGE = SITE / "tutorial" / "index.html"


def main():
    if not PAGE.exists():
        sys.exit(f"{PAGE} does not exist: run `make docs` first")
    take(PAGE, PICTURES / "site.png", width=1280, height=800)


if __name__ == "__main__":
    main()
