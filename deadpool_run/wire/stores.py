"""Messages about connections to the job's store, which serves a caller once the agent of its machine knows its user."""

from collections.abc import Iterator

from msgspec.structs import replace

from deadpool_run.structs import Port, Tagged, Untagged


class StoreListening(Tagged):
    """Reports the port on which the store's process serves."""

    port: Port


class StoreCaller(Untagged):
    """The other end of a connection to the store. `number` names the connection in answers."""

    number: int
    address: str
    port: Port


class IdentifyCallers(Tagged):
    """Asks whether processes of the job's user made these connections, which reached the store at `host` and `port`."""

    host: str
    port: Port
    callers: tuple[StoreCaller, ...]

    def by_address(self) -> Iterator[tuple[str, "IdentifyCallers"]]:
        """Yield each address of callers with the question about its callers only."""
        for address in dict.fromkeys(caller.address for caller in self.callers):
            yield address, replace(self, callers=tuple(each for each in self.callers if each.address == address))


class CallersIdentified(Tagged):
    """Answers `IdentifyCallers` with the numbers of connections that processes of the job's user made, and of the others."""

    known: tuple[int, ...]
    unknown: tuple[int, ...]


class StoreRefused(Tagged):
    """Reports how many connections the store refused. The last came from `source`, and was refused for this reason."""

    count: int
    source: str
    reason: str


ToStore = CallersIdentified
FromStore = StoreListening | IdentifyCallers | StoreRefused
