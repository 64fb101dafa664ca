"""The fixture of the recipes' tests."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import pytest
from launches import Running


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Running]]:
    """Start commands; whatever still runs at the end of the test is ended (its workers die with it)."""
    runs: list[Running] = []
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DEADPOOL_", "PET_"))}

    def _start(*command: object, env: Mapping[str, str] = MappingProxyType({})) -> Running:
        output = tmp_path / f"output{len(runs)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
                env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
            )
        runs.append(Running(process, output))
        return runs[-1]

    yield _start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            try:
                run.process.wait(10)
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait(10)
