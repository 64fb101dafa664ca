"""Further tries of a repair with the same workers: to connect, and to fetch a state from the same node."""

from deadpool_run.core import events as ev
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import Member
from deadpool_run.core.recovery import blame, shutdown
from deadpool_run.core.recovery.repair import begin_epoch, under_way
from deadpool_run.core.settings import more_to_attach_s
from deadpool_run.core.state import Repair
from deadpool_run.ids import Rank
from deadpool_run.text import counted, shortened

_ALONE = "it could not build its communicators"
_LONGEST_WAIT_S = 30.0
"""Between two tries to connect the same workers, or to fetch a state from the same node."""


def retry(decision: Decision, reason: str) -> None:
    """Begin an epoch with the same workers: the network failed, and may work again."""
    repair, patience_s = under_way(decision), decision.settings.join_timeout_s
    repair.retries += 1
    if decision.now > repair.began_at + patience_s:
        shutdown.stop(decision, 1, f"{reason}; the network has been failing for {patience_s:g} s")
        return
    begin_epoch(decision, reason)


def unconnected(repair: Repair) -> str:
    """Return what has failed, and which ranks were reached by the fewest."""
    votes = blame.votes(repair.unreached)
    most = max(votes.values(), default=0)
    names = [str(rank) for rank in sorted(votes) if votes[rank] == most]
    not_reached = (
        f"; {most} of {counted(len(repair.unreached), 'rank')} did not reach rank {shortened(names)}" if names else ""
    )
    return f"communicators could not be built, but no worker was lost{not_reached}"


def unattached(decision: Decision, member: Member, event: ev.AttachFailed) -> None:
    """Note which ranks the member did not reach."""
    world = decision.settings.world_size
    decision.repair.unreached[member.held_rank] = tuple(rank for rank in event.unreached if 0 <= rank < world)


def attach_failed(decision: Decision, member: Member) -> None:
    """Connect the same workers again, after a pause that grows each time. If that does not help, replace one of them.

    `blame.to_replace` chooses it. Where it chooses none, the whole network may be bad, and the attempts go on.
    """
    repair, settings = decision.repair, decision.settings
    patience_s = settings.repair_timeout_s + 2 * more_to_attach_s(settings.world_size)  # for two attempts
    is_patient = decision.now < (repair.replaced_for_network_at or repair.began_at) + patience_s
    worst = None if is_patient else blame.to_replace(repair.unreached, member.held_rank)
    owner = None if worst is None else decision.state.seats[worst].owner
    if worst is None or owner is None:
        wait_s = _pause_s(repair)
        repair.retry_at = decision.now + wait_s
        decision.announce(f"connecting the same workers again in {wait_s:g} s", unconnected(repair))
        return
    votes = blame.votes(repair.unreached).get(worst)
    who = f"{votes} of {counted(len(repair.unreached), 'rank')} could not connect to it" if votes else _ALONE
    decision.end(decision.state.members[owner], f"{who} for {patience_s:g} s, but no other worker was lost")
    decision.set_member(owner, blameless=True)
    repair.replaced_for_network_at = decision.now


def fetch_later(decision: Decision, rank: Rank) -> None:
    """Have the rank's state fetched again from the same node, after a pause that grows each time."""
    repair = decision.repair
    wait_s = _pause_s(repair)
    repair.retries += 1
    repair.fetch_again_at = decision.now + wait_s
    decision.announce(f"fetching the state of rank {rank} again in {wait_s:g} s", "no other node has it")


def fetch_again(decision: Decision) -> None:
    """Go on with the replacements that wait for their states."""
    decision.repair.fetch_again_at = None
    decision.changes.vacancies = True


def _pause_s(repair: Repair) -> float:
    return min(2.0**repair.retries, _LONGEST_WAIT_S)
