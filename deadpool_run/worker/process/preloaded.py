"""Imported last by the fork server: does once what each of its workers would do, and what does not depend on the script."""

from deadpool_run.worker import prefault
from deadpool_run.worker.compat.patches import skip_our_frames
from deadpool_run.worker.process import baseline  # noqa: F401 - a worker imports it before the script
from deadpool_run.worker.process.script_files import note_preloaded
from deadpool_run.worker.state import digest

skip_our_frames()
digest.prepare()
note_preloaded()
prefault.begin()
