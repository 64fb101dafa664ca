"""Records that a rehearsal is given and compared with: the transcript of collectives, set-up's outputs, digests of steps."""
