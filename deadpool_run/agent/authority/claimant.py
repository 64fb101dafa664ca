"""One agent's claims to lead, made while its event loop goes on."""

import asyncio

from deadpool_run.agent.authority.bounded import BoundedAuthority
from deadpool_run.agent.authority.claim import LeaderClaim
from deadpool_run.agent.console import tell
from deadpool_run.errors import AuthorityError
from deadpool_run.wire.peers import Peer


class Claimant:
    """Asks an authority, in the running loop, for the agent `here`.

    The user is told once that the authority cannot be asked, and of the consequence.
    """

    def __init__(self, authority: BoundedAuthority, here: Peer, consequence: str) -> None:
        self._authority = authority
        self._here = here
        self._consequence = consequence
        self._told = ""

    async def claim(self, term: int, *, trial: bool = False) -> bool | None:
        """Claim a term, or find out whether it would be granted; return None if the authority cannot be asked."""
        claim = LeaderClaim(term, self._here.node, self._here.address, self._here.port, self._authority.run_id)
        ask = self._authority.would_grant if trial else self._authority.claim
        try:
            return await asyncio.to_thread(ask, claim)
        except AuthorityError as error:
            if self._told != str(error):
                self._told = str(error)
                tell(f"{error}\nuntil the authority answers, {self._consequence}")
            return None
