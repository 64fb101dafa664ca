"""Helper of the tests of single rules of the election."""

from deadpool_run.core.leadership import election
from deadpool_run.core.leadership import electorate as el


def step(agent, *events, now, awake=True):
    """Give an agent these events at one time; return its state and all outputs.

    Until then it looked as often as it should, unless it was not awake: then the machine was paused.
    """
    outputs = []
    while awake and (due := election.next_deadline(agent)) is not None and agent.looked_at < due < now:
        agent, more = election.step(agent, el.Tick(), due)
        outputs += more
    for event in events:
        agent, more = election.step(agent, event, now)
        outputs += more
    return agent, outputs
