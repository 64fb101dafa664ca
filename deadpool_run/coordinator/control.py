"""The control socket: how viewers and `kill-rank` talk to a live run.

A UNIX stream socket, `control.sock` in the run directory (mode 0600 in a directory of mode 0700); a peer of another
user is refused. Each request is one line, a JSON object; each answer is one line, a JSON object. A connection may ask
several times. Requests:

    {"do": "status"}                                  -> the status object, see `StatusSource`
    {"do": "watch", "every_s": 1.0}                   -> status objects, one a line: at once, after each decision of the
                                                         coordinator (at most 10 a second) and at least each `every_s`
    {"do": "kill-rank", "rank": 1, "how": "sigkill"}  -> {"ok": true, "rank": 1, "worker": 4, "pid": 4711, "how": "sigkill"}
                                                         `how`: a `core.events.KillHow` value
    {"do": "stop"}                                    -> {"ok": true}: the job ends as if SIGTERM had come

Anything that cannot be done is answered with {"error": "<what is wrong>"}; the connection stays open. A line that is
longer than `MAX_LINE_BYTES` closes it. Nothing that a viewer does, or fails to do, can block or fail the job.

The status object has what `core.status` publishes, and beside it what only the agent knows: `run` (what `run.json`
holds) and per rank `pid` and the board's `phase` (lower-case name), `step`, `step_ms`, `capture_ms` and `snapshots`.
"""
