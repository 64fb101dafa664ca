"""The search is a program: its modules are found beside it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
