"""Events and effects of the coordinator as JSON: in its journal, and between agents."""

from collections.abc import Mapping
from typing import Any, get_args

from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event
from deadpool_run.wire import typed

_EVENTS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
_EFFECTS: Mapping[str, type[Effect]] = {kind.__name__: kind for kind in get_args(Effect)}

encode = typed.encode


def decode_event(parts: Mapping[str, Any]) -> Event:
    """Return the event that `encode` was given. Raises ProtocolError."""
    event: Event = typed.decode(_EVENTS, parts)
    return event


def decode_effect(parts: Mapping[str, Any]) -> Effect:
    """Return the effect that `encode` was given. Raises ProtocolError."""
    effect: Effect = typed.decode(_EFFECTS, parts)
    return effect
