"""Writes the stacks of all threads on a signal, for `deadpool-run stack`."""

import faulthandler

from deadpool_run.vault.segments import create_memory
from deadpool_run.wire.stacks import STACK_MEMORY, STACK_SIGNAL


def install() -> None:
    """Have the signal write the stacks into memory of this process, which goes on. It ends with the process."""
    faulthandler.register(STACK_SIGNAL, create_memory(STACK_MEMORY), all_threads=True)
