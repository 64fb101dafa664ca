"""Puts the search's folder on the module path, as when the program runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
