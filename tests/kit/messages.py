"""Hypothesis strategies for messages and their parts: values that decoding does not refuse."""

from hypothesis import strategies as st

from deadpool_run.core import events as ev
from deadpool_run.core.leadership.electorate import Configuration
from deadpool_run.wire import peers
from deadpool_run.wire.stores import IdentifyCallers, StoreCaller


def register():
    """Have `st.from_type` draw floats that JSON has, ports that TCP has, and at least one configuration."""
    st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
    port = {"port": st.integers(0, 65535)}
    for kind in (ev.Place, peers.Peer, StoreCaller, IdentifyCallers):
        st.register_type_strategy(kind, st.builds(kind, **port))
    configurations = st.lists(st.from_type(Configuration), min_size=1, max_size=2).map(tuple)
    st.register_type_strategy(peers.Agents, st.builds(peers.Agents, configurations=configurations))
