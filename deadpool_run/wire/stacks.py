"""The stacks of a worker's threads: on a signal it writes them into memory that it shares by name.

The handler is CPython's faulthandler, which needs no lock of the interpreter: it also answers while a C function hangs.
"""

import signal

STACK_SIGNAL = signal.SIGRTMIN + 7
"""A real-time signal, which nothing else uses: SIGUSR1 and SIGUSR2 are the script's."""
STACK_MEMORY = "stacks"
"""The name of the memory, as `vault.segments.create_memory` takes it."""
