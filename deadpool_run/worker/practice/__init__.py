"""Runs for practice (a rehearsal, the trial's first run, an interrupted step): output is marked, and no file is overwritten."""
