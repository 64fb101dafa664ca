"""Chromium, which takes pictures of pages: `chromium`, `google-chrome` or $CHROMIUM."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
NAMES = ("chromium", "chromium-browser", "google-chrome")


def program():
    """Return the program of the browser."""
    named = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else NAMES
    found = next(filter(None, map(shutil.which, named)), None)
    if found is None:
        sys.exit(f"none of {', '.join(named)} is installed: set CHROMIUM to the program")
    return found


def take(page, picture, *, width, height, dark=False):
    """Have the browser write a picture of the upper part of a page: pixels."""
    # Blink's number of the colour scheme: 0 is dark, 1 is light.
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    size = (f"--window-size={width},{height}", "--hide-scrollbars", "--force-device-scale-factor=1")
    subprocess.run(
        [
            program(),
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
