"""A check of traces against the format that Perfetto and chrome://tracing read.

Source: Trace Event Format, Google, 2016: the JSON Object Format and the phases X, i, C and M.
"""

import json
from typing import Any

_METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
}


def check_trace(text: str) -> list[dict[str, Any]]:
    """Assert that each event has what its phase needs, and that spans of a track are nested; return the events."""
    document = json.loads(text, parse_constant=_refuse)
    events = document["traceEvents"]
    assert document["displayTimeUnit"] in {"ms", "ns"}
    named = {event["pid"] for event in events if (event["ph"], event["name"]) == ("M", "process_name")}
    for event in events:
        check_event(event)
        assert event["pid"] in named, f"a process without a name: {event}"
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        check_nested(spans)
    return events


def check_event(event: dict[str, Any]) -> None:
    """Assert that an event has what its phase needs."""
    assert isinstance(event["name"], str), event
    assert event["name"], event
    for number in ("pid", "tid"):
        assert type(event[number]) is int, event
        assert event[number] >= 0, event
    if event["ph"] != "M":
        assert _is_time(event["ts"]), event
    match event["ph"]:
        case "X":
            assert _is_time(event["dur"]), event
            assert isinstance(event["args"], dict), event
        case "i":
            assert event["s"] in {"g", "p", "t"}, event
        case "C":
            assert event["args"], event
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
        case "M":
            assert _METADATA[event["name"]] in event["args"], event
        case other:
            raise AssertionError(f"phase {other!r}: {event}")


def check_nested(spans: list[tuple[float, float]]) -> None:
    """Assert that of two spans one holds the other, or they do not touch, to a microsecond."""
    open_: list[float] = []
    for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ and open_[-1] <= began + 1:
            open_.pop()
        assert not open_ or ended <= open_[-1] + 1, (began, ended, open_)
        open_.append(ended)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _refuse(constant: str) -> None:
    raise AssertionError(f"JSON has no {constant}")
