"""Take the pictures of the report: docs/pictures/report-light.png and report-dark.png.

    python tests/pictures/report.py [docs/examples/chaos.html]

It needs Chromium (`chromium`, `google-chrome` or $CHROMIUM). Run it again when the report looks different.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "examples" / "chaos.html"
PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1080, 1480
NAMES = ("chromium", "chromium-browser", "google-chrome")


def browser():
    """Return the program of the browser."""
    named = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else NAMES
    found = next(filter(None, map(shutil.which, named)), None)
    if found is None:
        sys.exit(f"none of {', '.join(named)} is installed: set CHROMIUM to the program")
    return found


def take(page, picture, *, dark):
    """Have the browser write a picture of the page."""
    # Blink's number of the colour scheme: 0 is dark, 1 is light.
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    size = (f"--window-size={WIDTH},{HEIGHT}", "--hide-scrollbars", "--force-device-scale-factor=1")
    subprocess.run(
        [
            browser(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            *size,
            scheme,
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    page = parser.parse_args().page.resolve()
    for dark in (False, True):
        take(page, PICTURES / f"report-{'dark' if dark else 'light'}.png", dark=dark)


if __name__ == "__main__":
    main()
