"""Helper of the tests of single rules of the election."""

from deadpool_run.core.leadership import election


def step(agent, *events, now):
    """Give an agent these events at one time; return its state and all outputs."""
    outputs = []
    for event in events:
        agent, more = election.step(agent, event, now)
        outputs += more
    return agent, outputs
