"""One agent's claims to lead, made while its event loop goes on."""

import asyncio
from collections.abc import Callable

from deadpool_run.agent.authority.bounded import BoundedAuthority
from deadpool_run.agent.authority.claim import LeaderClaim
from deadpool_run.agent.console import tell
from deadpool_run.coordinator.tasks import Tasks
from deadpool_run.errors import AuthorityError
from deadpool_run.ids import NodeId


class Claimant:
    """Asks an authority, in the running loop. `address` and `port` are where the agent can be reached."""

    def __init__(
        self,
        authority: BoundedAuthority,
        node: NodeId,
        address: str,
        port: int,
        on_answer: Callable[[int, bool, bool], None],
    ) -> None:
        """`on_answer` takes the term, whether it was a trial, and whether it is granted. No answer: ask again."""
        self._authority = authority
        self._node, self._address, self._port = node, address, port
        self._on_answer = on_answer
        self._tasks = Tasks()
        self._asking: set[tuple[int, bool]] = set()
        self._told = ""

    def ask(self, term: int, *, trial: bool) -> None:
        """Claim a term, or find out whether it would be granted; nothing, while the same question has no answer yet."""
        if (term, trial) not in self._asking:
            self._asking.add((term, trial))
            self._tasks.start(self._ask(term, trial))

    def close(self) -> None:
        """Take no answer any more."""
        self._tasks.cancel()

    async def _ask(self, term: int, trial: bool) -> None:
        claim = LeaderClaim(term, self._node, self._address, self._port, self._authority.run_id)
        ask = self._authority.would_grant if trial else self._authority.claim
        try:
            granted = await asyncio.get_running_loop().run_in_executor(None, ask, claim)
        except AuthorityError as error:
            if self._told != str(error):
                self._told = str(error)
                tell(f"{error}\nuntil the authority answers, neither of the two machines may go on without the other")
            return
        finally:
            self._asking.discard((term, trial))
        self._on_answer(term, trial, granted)
