"""Begins and ends a run for practice, for all that is outside of the process."""

from deadpool_run.worker.practice import output
from deadpool_run.worker.practice.files import Kind, file_copies


def begin(*, in_trial: bool = False) -> None:
    """Mark what is printed, and write to copies of files. The process goes on: `end` undoes it."""
    output.install()
    file_copies.begin(Kind.TRIAL if in_trial else Kind.REHEARSAL)


def end() -> None:
    """Print and write as always again."""
    output.lift()
    file_copies.end()


def interrupt() -> None:
    """Treat the rest of the running step alike: it has wrong results and will be repeated. Any thread."""
    output.install(output.INTERRUPTED)
    file_copies.begin(Kind.INTERRUPTED)


def end_interrupted() -> None:
    """End what `interrupt` began, if it did."""
    output.lift(output.INTERRUPTED)
    file_copies.end_interrupted()
