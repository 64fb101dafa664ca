"""Slurm's own commands, run with a timeout."""

import asyncio

_TIMEOUT_S = 20.0


async def run_command(*command: str) -> tuple[str, str]:
    """Run a command; return why it failed (empty if it did not) and what it printed.

    It has a group of its own: a terminal's Ctrl-C must not end it.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,
        )
    except OSError as error:
        return error.strerror or "cannot be run", ""
    try:
        printed, complained = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"no answer within {_TIMEOUT_S:.0f} s", ""
    failed = f"exit code {process.returncode}" if process.returncode else ""
    return failed and (complained.decode(errors="replace").strip() or failed), printed.decode(errors="replace")
