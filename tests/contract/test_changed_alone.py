"""Objects that a step changes and no snapshot holds: the user is warned before they have an effect."""

from pathlib import Path
from re import findall

from kit.cluster import Cluster

SCRIPT = Path(__file__).parent / "scripts" / "changed_alone.py"


def test_the_user_is_warned_once_of_those_that_are_not_for_output(cluster):
    job: Cluster = cluster(script=SCRIPT, nproc=2, spares=1)
    assert job.wait_exit() == 0, job.told()
    assert findall(r"RuntimeWarning: (.+?), and snapshots do not keep what is in there", job.stderr) == [
        "step 1 changes main().average (Meter)"
    ]
