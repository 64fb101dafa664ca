"""Imported last by the fork server: notes which modules are imported before any script runs, so that workers need not look at them."""

from deadpool_run.worker.process import baseline  # noqa: F401 - a worker imports it before the script
from deadpool_run.worker.process.script_files import note_preloaded

note_preloaded()
