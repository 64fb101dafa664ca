"""Take the pictures of the report: docs/pictures/report-light.png and report-dark.png.

    python tests/pictures/report.py [docs/examples/chaos.html]

It needs Chromium. Run it again when the report looks different.
"""

import argparse
from pathlib import Path

from browser import PICTURES, take

PAGE = PICTURES.parent / "examples" / "chaos.html"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    page = parser.parse_args().page.resolve()
    for dark in (False, True):
        take(page, PICTURES / f"report-{'dark' if dark else 'light'}.png", width=1080, height=1480, dark=dark)


if __name__ == "__main__":
    main()
