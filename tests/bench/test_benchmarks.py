"""Every benchmark runs, with its smallest parameters: one that nobody runs is found broken only by a reader of the docs."""

import subprocess
import sys
from pathlib import Path

import pytest
from kit.choice import often

HERE = Path(__file__).resolve().parent
SMALLEST = {
    "big_state.py": "--mib 64 --kills 1",
    "capture.py": "8",
    "collectives.py": "--count 20",
    "nodes.py": "--losses 1 --torchrun-losses 0 --size tiny",
    "overhead.py": "--quick --load tiny --load images",
    "recovery.py": "--ranks 2 --kills 1 --torchrun-kills 1",
    "replication.py": "--quick --mib 1 --streams 1",
    "scale.py": "--nodes 12,24 --lose 1",
    "soak.py": "--kills 7 --ranks 2",
    "spares.py": "--kills 1",
    "startup.py": "--ranks 2 --rounds 1",
    "versions.py": f"{HERE.parents[1]} --turns 1 --kills 1",
    "viewers.py": "--ranks 64 --viewers 2 --seconds 1",
}
USUAL = {"scale.py"}
"""Those of `make test`: its agents are simulated by hand, so it breaks most easily."""
LIMIT_S = 600


def test_none_is_forgotten():
    with_usage = {path.name for path in HERE.glob("*.py") if f"    python tests/bench/{path.name}" in path.read_text()}
    assert with_usage == SMALLEST.keys()


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.xdist_group("hosts")  # one at a time: each starts several jobs
@pytest.mark.parametrize("name", often(SMALLEST, USUAL))
def test_a_benchmark_runs(name):
    command = [sys.executable, str(HERE / name), *SMALLEST[name].split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), done.stderr
