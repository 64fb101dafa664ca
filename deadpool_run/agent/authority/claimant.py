"""One agent's claims to lead, made while its event loop goes on."""

import asyncio
from dataclasses import dataclass

from deadpool_run.agent.authority.bounded import BoundedAuthority
from deadpool_run.agent.authority.claim import LeaderClaim
from deadpool_run.agent.console import tell
from deadpool_run.errors import AuthorityError
from deadpool_run.wire.peers import Peer


@dataclass(eq=False, slots=True)
class Claimant:
    """Asks an authority, in the running loop, for the agent `here`.

    If the authority cannot be asked, the user is told once, with the consequence.
    """

    authority: BoundedAuthority
    here: Peer
    consequence: str
    _told: str = ""

    async def claim(self, term: int, *, pre_vote: bool = False) -> bool | None:
        """Claim a term, or find out whether it would be granted; return None if the authority cannot be asked."""
        claim = LeaderClaim(term, self.here.node, self.here.address, self.here.port, self.authority.run_id)
        ask = self.authority.would_grant if pre_vote else self.authority.claim
        try:
            return await asyncio.to_thread(ask, claim)
        except AuthorityError as error:
            if self._told != str(error):
                self._told = str(error)
                tell(f"{error}\nuntil the authority answers, {self.consequence}")
            return None
