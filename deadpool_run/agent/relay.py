"""The control socket of an agent that follows: what viewers on its machine ask is asked of the coordinator's agent."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deadpool_run.coordinator.control import ControlSocket
from deadpool_run.wire import peers

_ANSWER_S = 4.0
"""Below what viewers wait for."""


class Relay:
    """In the running loop. `ask` sends a question, and returns whether there was anybody to send it to."""

    def __init__(self, run_dir: Path, ask: Callable[[peers.Ask], bool]) -> None:
        self._ask = ask
        self._numbers = itertools.count()
        self._awaited: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._socket = ControlSocket(run_dir, self._reply)

    async def start(self) -> None:
        """Bind and listen. Raises OSError."""
        await self._socket.start()

    def answered(self, told: peers.Answer) -> None:
        """Pass an answer on, if somebody still waits for it."""
        waiting = self._awaited.get(told.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(told.answer)

    async def close(self) -> None:
        """Hang up on everyone and unlink the socket."""
        await self._socket.close()

    async def _reply(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        number = next(self._numbers)
        waiting: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._awaited[number] = waiting
        try:
            if not self._ask(peers.Ask(number, dict(request))):
                return {"error": "nobody leads the job at the moment: ask again in some seconds"}
            async with asyncio.timeout(_ANSWER_S):
                return await waiting
        except TimeoutError:
            return {"error": f"the agent that leads the job has not answered within {_ANSWER_S:g} s"}
        finally:
            del self._awaited[number]
