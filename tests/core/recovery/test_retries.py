"""The choice of the rank to replace if communicators cannot be built although no worker was lost."""

import pytest

from deadpool_run.core.recovery.blame import to_replace


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({1: ()}, 1),
        ({0: (), 1: (), 2: ()}, 1),
        ({0: (2,), 1: (2,), 2: (0, 1, 3), 3: (2,)}, 2),
        ({0: (2,), 1: (2,), 3: (2,)}, 2),
        ({0: (2,), 1: (), 3: (2,)}, 2),
        ({0: (4, 5), 1: (4, 5), 2: (4, 5), 3: (4, 5), 4: (0, 1, 2, 3, 5)}, 5),
        ({0: (1,), 1: (0,)}, 1),
        ({0: (1,)}, 1),
        ({0: (1,), 1: (0,), 2: ()}, None),
        ({0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}, None),
        ({0: (1,), 1: (2,), 2: (3,), 3: (0,)}, None),
        ({0: (0, 0, 0), 1: (2,), 2: ()}, None),
        ({0: (3, 3, 3), 1: (), 2: ()}, None),
    ],
)
def test_the_rank_that_most_reports_name_is_replaced(reports, expected):
    assert to_replace(reports, 1) == expected
