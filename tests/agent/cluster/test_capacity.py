"""The agent raises its limit on open files, and says if that is too little for the job."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, sys
from deadpool_run.agent.cluster.capacity import raise_limits
from deadpool_run.core.settings import Settings
soft, hard, ranks, nodes = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
line = raise_limits(Settings(world_size=ranks * nodes, nodes=nodes))
print(json.dumps([line, *resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


@pytest.mark.parametrize(
    ("ranks", "nodes", "wanted"),
    [(8, 1, None), (64, 1, 64 + 20 * 64), (8, 1000, 64 + 20 * 8 + 4 * 999), (8, 100, None)],
)
def test_the_hard_limit_is_used_and_one_that_is_too_low_is_reported(ranks, nodes, wanted):
    command = [sys.executable, "-c", PROGRAM, "256", "1024", str(ranks), str(nodes)]
    line, soft, hard = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert (soft, hard) == (1024, 1024)
    assert (f"may need {wanted}: " in line) if wanted else not line
