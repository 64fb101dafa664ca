"""What the tests of single rules of the election share."""

from deadpool_run.core.leadership import election


def step(agent, *events, now):
    """Tell an agent these facts at one time; return it, and all that it put out."""
    outputs = []
    for event in events:
        agent, more = election.step(agent, event, now)
        outputs += more
    return agent, outputs
