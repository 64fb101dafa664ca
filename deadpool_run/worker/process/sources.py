"""Finds the script's own modules whose files were edited after the rank's first process imported them.

A replacement would import the edited ones, and train otherwise than the other ranks. (The script itself cannot differ:
workers run a copy.) Imports nothing of torch.
"""

from collections.abc import Container, Mapping
from typing import Any

from deadpool_run.vault.segments import digest_of
from deadpool_run.worker.process.script_files import ImportedModules, own_modules

_before: Container[str] = ()
"""The modules that were loaded before the script began: `--preload` has them imported once, for all workers of a node."""


def begin(*, copied: bool) -> None:
    """Note which modules are loaded before the script. `copied`: the script itself is run from a copy."""
    global _before  # noqa: PLW0603 - of this process, as `sys.modules` is
    _before = ImportedModules(but=() if copied else ("__main__",))


def record() -> dict[str, Any]:
    """Return time of change, size and digest of each module's file, by module, as JSON values."""
    found = {}
    for name, _, file in own_modules(_before):
        try:
            status, content = file.stat(), file.read_bytes()
        except OSError:
            continue  # it was removed after the import
        found[name] = [status.st_mtime_ns, status.st_size, digest_of(content).hex()]
    return found


def edited(recorded: Mapping[str, Any]) -> list[str]:
    """Return the files of modules that differ from those which were recorded, on this or another machine."""
    found = []
    for name, _, file in own_modules(_before):
        if name not in recorded:
            continue
        *stamp, digest = recorded[name]
        try:
            status = file.stat()
            same = [status.st_mtime_ns, status.st_size] == stamp or digest_of(file.read_bytes()).hex() == digest
        except OSError:
            same = True
        if not same:
            found.append(str(file))
    return found
