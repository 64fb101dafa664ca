"""A process that claims terms at an authority: `python claimer.py TEXT RUN_ID NAME [SERVICE_ACCOUNT]`.

A line on stdin is a term to claim, or `race N`: N times, the term after the current one. Each line on stdout is JSON:
`saw` (the current claim), or `term` and `won`. A request without an answer is repeated for up to a minute.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from deadpool_run.agent.authority import kubernetes_authority
from deadpool_run.agent.authority.claim import LeaderClaim
from deadpool_run.agent.authority.parse import parse_authority
from deadpool_run.errors import AuthorityError


def answered(ask):
    until = time.monotonic() + 60
    while True:
        try:
            return ask()
        except AuthorityError:
            if time.monotonic() > until:
                raise


def main(text, run_id, name, account=None):
    if account is not None:
        kubernetes_authority.SERVICE_ACCOUNT = Path(account)
    authority = parse_authority(text, run_id)

    def claim(term):
        wanted = LeaderClaim(term, name, "10.0.0.1", 1 + term % 1000, run_id)
        say(term=term, won=answered(lambda: authority.claim(wanted)))

    say(ready=name)
    for line in sys.stdin:
        if not line.startswith("race"):
            claim(int(line))
            continue
        for _ in range(int(line.split()[1])):
            seen = answered(lambda: authority.read().claim)
            say(saw=None if seen is None else asdict(seen))
            claim(0 if seen is None else seen.term + 1)
        say(done=name)


def say(**what):
    print(json.dumps(what), flush=True)


main(*sys.argv[1:])
